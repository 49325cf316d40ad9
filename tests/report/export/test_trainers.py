"""accelerate, as the library reads it; plans for training."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning
from accelerate.utils import get_max_memory
from accelerate.utils.modeling import check_device_map
from exported import assigned
from staged import staged
from torch import nn
from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from duoka import Plan, export, plan
from duoka.errors import UsageError
from duoka.forecast.workload import Training, Workload

pytestmark = pytest.mark.usefixtures("single_sequences")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(x).relu()


class Decoder(nn.Module):
    """The form of a language model; positions that change places would change its output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([Layer() for _ in range(6)])
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 64)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.lm_head(self.norm(x))
        return logits


IDS = torch.arange(12).reshape(1, 12)


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.manual_seed(0)
    return Decoder().eval()


@pytest.fixture(scope="module")
def split_plan(model: Decoder) -> Plan:
    return plan(model, "virtual:3x64MiB", inputs=(IDS,), use_all=True)


def test_accelerate_takes_the_map(model: Decoder, split_plan: Plan) -> None:
    names = assigned(export(split_plan, "accelerate").text)
    check_device_map(model, names["device_map"])
    assert get_max_memory(names["max_memory"]) == dict.fromkeys(range(3), 64 * 2**20)
    assert names["device_map"]["lm_head"] == 2


def test_accelerates_program_is_one() -> None:
    compile(export(staged([3, 2]), "accelerate").text, "export", "exec")
    told = str(export(replace(staged([3]), model="ChatGLMForCausalLM"), "accelerate"))
    assert "transformers 5 has no ChatGLMForCausalLM" in told


@pytest.mark.parametrize("family", ["llama", "tied"])
def test_accelerates_program_runs(family: str, tmp_path: Path) -> None:
    """With the real libraries; the processor is in the place of both GPUs."""
    path = tuning.write_model(family, tmp_path / family)
    workload = Workload(prompt_tokens=8, new_tokens=4)
    split = plan(path, "virtual:2x64MiB", workload, use_all=True)
    text = export(split, "accelerate").text
    device_map = assigned(text)["device_map"]
    assert set(device_map.values()) == {0, 1}
    names: dict[str, Any] = {}
    exec(re.sub(r"(?m)^(    '.*': )[01],$", r"\1'cpu',", text), names)
    model = names["model"]
    assert model.dtype == getattr(torch, split.workload.dtype)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=model.dtype)
    check_device_map(whole, device_map)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, whole(IDS).logits)


def test_accelerates_program_pins_the_revision_and_quantizes() -> None:
    """The settings are read by transformers and the packages themselves."""
    commit = "0123456789abcdef" * 2 + "01234567"
    for scheme, expected in (
        ("int8", TorchAoConfig(Int8WeightOnlyConfig())),
        ("int4", TorchAoConfig(Int4WeightOnlyConfig(int4_packing_format="tile_packed_to_4d"))),
        ("nf4", BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                   bnb_4bit_compute_dtype=torch.bfloat16)),
    ):  # fmt: skip
        base = staged([3, 2])
        workload = replace(base.workload, quantize=scheme)
        plan = replace(base, workload=workload, source=f"zai-org/glm-4-9b@{commit}")
        given: dict[str, Any] = {}

        class Taken:
            from_pretrained = staticmethod(lambda *args, found=given, **kwargs: found.update(
                kwargs, model=args[0]
            ))  # fmt: skip

        program = export(plan, "accelerate").text.replace(
            "from transformers import AutoModelForCausalLM", ""
        )
        exec(program, {"AutoModelForCausalLM": Taken})
        assert (given["model"], given["revision"]) == ("zai-org/glm-4-9b", commit)
        assert given["device_map"]["model.layers.3"] == 1
        assert given["quantization_config"].to_dict() == expected.to_dict()


@pytest.mark.parametrize("tool", ["vllm", "sglang", "llama.cpp"])
def test_a_plan_for_training_is_nothing_to_serve(tool: str) -> None:
    workload = Workload(
        prompt_tokens=512, new_tokens=0, dtype="bfloat16", training=Training(),
        prefill_chunk_tokens=None,
    )  # fmt: skip
    with pytest.raises(UsageError, match="is for inference, and the plan is for training"):
        export(replace(staged([4, 2]), workload=workload), tool)

"""Stacks of experts quantized on the way: as the whole stack, and one expert at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import duoka
from duoka import Checkpoint, Placement, Workload, virtual
from duoka.models import build
from duoka.models.quantization import ExpertStack, Scheme, num_bytes, quantize_model
from duoka.models.quantization.stacked import quantize_stack
from duoka.runtime.load import fill, load_weights

pytestmark = pytest.mark.usefixtures("single_sequences")

SCHEMES: tuple[Scheme, ...] = ("int8", "int4", "nf4")
EXPERTS, HIDDEN, WIDTH = 32, 256, 192
CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN, "num_hidden_layers": 1, "vocab_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts": EXPERTS, "num_experts_per_tok": 2,
    "num_local_experts": EXPERTS, "n_routed_experts": EXPERTS, "moe_intermediate_size": WIDTH,
    "intermediate_size": WIDTH, "first_k_dense_replace": 0, "max_position_embeddings": 512,
    "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
# As published: a matrix for each expert and projection; in gpt_oss transposed stacks.
FAMILIES = ("mixtral", "gpt_oss", "qwen3_moe", "glm4_moe")


def write_model(family: str, path: Path, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**CONFIG, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    with safe_open(path / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if "experts" in name and "bias" not in name]  # noqa: SIM118
    num_matrices = len(experts_of(model)) * (2 if family == "gpt_oss" else 3 * EXPERTS)
    assert len([name for name in names if "shared" not in name]) == num_matrices
    return model


def experts_of(model: nn.Module) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of incomplete weights on the host, after each piece."""
    sizes = [0]
    put = fill.Quantizer._put_matrix

    def counted(self: fill.Quantizer, name: str, target: Tensor, *piece: Any) -> None:
        put(self, name, target, *piece)
        sizes.append(sum(tensor.nbytes for tensor in self._gathered.values()))

    monkeypatch.setattr(fill.Quantizer, "_put_matrix", counted)
    return sizes


@pytest.mark.parametrize("device", ["vgpu:0", "cpu"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_loaded_is_the_stack_quantized(
    family: str, scheme: Scheme, device: str, tmp_path: Path, gathered: list[int]
) -> None:
    hold(write_model(family, tmp_path), tmp_path, scheme, device)
    assert max(gathered) <= 2 * HIDDEN * 2 * WIDTH  # a matrix of one expert in 16 bit


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_what_is_read_in_parts_of_an_expert(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gathered: list[int]
) -> None:
    model = write_model(family, tmp_path)
    for stretch_bytes in (2**15, 3 * 2**14):  # 64 rows, and 96
        monkeypatch.setattr(fill, "STRETCH_BYTES", stretch_bytes)
        for scheme in SCHEMES:
            hold(model, tmp_path, scheme, "vgpu:0")
    assert max(gathered) <= 2 * HIDDEN * 2 * WIDTH


def test_projections_between_the_rows_of_a_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gathered: list[int]
) -> None:
    """96 rows of a gate, and 96 of another projection: layouts interleave 64."""
    model = write_model("mixtral", tmp_path, intermediate_size=96)
    for stretch_bytes in (2**20, 2**15):  # a gate is read in parts of 64 rows and 32
        monkeypatch.setattr(fill, "STRETCH_BYTES", stretch_bytes)
        for scheme in ("int8", "int4"):
            hold(model, tmp_path, scheme, "vgpu:0")
    assert max(gathered) <= 2 * HIDDEN * 3 * 96


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_front_door_loads_what_was_planned(family: str, tmp_path: Path) -> None:
    model = write_model(family, tmp_path)
    work = Workload(prompt_tokens=20, new_tokens=4, quantize="int4")
    loaded = duoka.load(duoka.plan(tmp_path, "virtual:2x24MiB", work, use_all=True))
    hold_stacks(loaded, model, "int4")
    tokens = torch.arange(20, device="vgpu:0")[None]
    assert loaded.generate(tokens, max_new_tokens=3, do_sample=False).shape == (1, 23)


def hold(model: Any, path: Path, scheme: Scheme, device: str) -> None:
    """Load a model onto a device, within its size, and compare its stacks."""
    checkpoint = Checkpoint.open(path)
    with virtual.gpus([None], data="cpu") as world:
        loaded = build(checkpoint.config, dtype=torch.bfloat16)
        quantize_model(loaded, scheme)
        load_weights(loaded, checkpoint, Placement(entries=(("", device),)))
        held = sum(num_bytes(tensor) for tensor in (*loaded.parameters(), *loaded.buffers()))
        if device != "cpu":
            # Beside the weights there is a matrix of one expert, and what its quantization takes:
            # less than a half of the stack in 16 bit.
            assert world.max_memory_allocated(0) < held + 30 * HIDDEN * 2 * WIDTH
        hold_stacks(loaded, model, scheme)


def hold_stacks(loaded: nn.Module, model: nn.Module, scheme: Scheme) -> None:
    """Compare each stack of a loaded model with the original stack, quantized at once."""
    count = 0
    for module, original in zip(experts_of(loaded), experts_of(model), strict=True):
        for name, stack in module.named_parameters(recurse=False):
            if not isinstance(stack, ExpertStack):
                continue
            count += 1
            plain = original.get_parameter(name).detach().to(stack.device)
            right = quantize_stack(plain, scheme, is_transposed=original.is_transposed)
            assert stack.weight_class is right.weight_class
            for key, part in right.tensors.items():
                assert torch.equal(stack.tensors[key].cpu(), part.cpu()), (name, key)
    assert count == 2 * len(experts_of(model)) > 0

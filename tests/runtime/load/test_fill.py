"""Quantized on the way: the same as the whole, within the quantized size, or not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from published import LLAMA
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import duoka
from duoka import Checkpoint, Placement, Workload, virtual
from duoka.errors import LoadError
from duoka.models import build
from duoka.models.quantization import (
    Scheme,
    is_composed,
    num_bytes,
    parts,
    quantize,
    quantize_model,
)
from duoka.runtime.load import load_weights

pytestmark = pytest.mark.usefixtures("single_sequences")

WIDE: dict[str, Any] = {
    **LLAMA,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    known = {name: value for name, value in WIDE.items() if name not in ("model_type", "dtype")}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**known)).to(torch.bfloat16).save_pretrained(path)
    return path


def built(path: Path, scheme: Scheme) -> PreTrainedModel:
    model = build(json.loads((path / "config.json").read_text()), dtype=torch.bfloat16)
    quantize_model(model, scheme)
    return model


@pytest.mark.parametrize("device", ["cpu", "vgpu:0"])
@pytest.mark.parametrize("scheme", ["int8", "int4", "nf4"])
def test_what_is_loaded_is_the_weight_quantized(path: Path, scheme: Scheme, device: str) -> None:
    originals = load_file(path / "model.safetensors")
    with virtual.gpus([None], data="cpu") as world:
        model = built(path, scheme)
        load_weights(model, Checkpoint.open(path), Placement(entries=(("", device),)))
        held = sum(num_bytes(each) for each in (*model.parameters(), *model.buffers()))
        if device != "cpu":
            # The weights in 16 bit are 4 times the rows that are quantized at once.
            assert held <= world.memory_allocated(0) < held + 2**16
            assert world.max_memory_allocated(0) < held + 48 * 2**20
        for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.v_proj.weight"):
            whole = quantize(originals[name].to(device), scheme)
            for part, right in parts(whole).items():
                assert torch.equal(parts(model.get_parameter(name))[part].cpu(), right.cpu())


def test_a_failure_leaves_nothing_behind(path: Path, tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.mkdir()
    (short / "config.json").write_bytes((path / "config.json").read_bytes())
    (short / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    checkpoint = Checkpoint.open(short)
    with (short / "model.safetensors").open("r+b") as file:
        file.truncate(2**20)
    with virtual.gpus([None], data="cpu") as world:
        model = built(path, "int8")
        with pytest.raises(LoadError):
            load_weights(model, checkpoint, Placement(entries=(("", "vgpu:0"),)))
        assert world.memory_allocated(0) == 0
        assert all(each.is_meta for each in model.parameters())
        assert any(is_composed(each) for each in model.parameters())


@pytest.mark.slow
def test_the_front_door_loads_what_was_planned(path: Path) -> None:
    work = Workload(prompt_tokens=20, new_tokens=4, quantize="int8")
    plan = duoka.plan(path, "virtual:2x96MiB", work)
    model = duoka.load(plan)
    ids = torch.randint(0, 500, (1, 20)).to("vgpu:0")
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 23)

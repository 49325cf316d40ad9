"""The part of a model that one process trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainers import make_batches, make_layout, make_part
from transformers import AutoModelForCausalLM

from duoka import TuneSettings
from duoka.tuner import part as module
from duoka.tuner.part import ModelPart

OPTIONS: dict[str, Any] = {"seq_length": 32, "batch": 4}
Make = Callable[..., ModelPart]


@pytest.fixture
def make(llama: Path) -> Make:
    def make(stages: int = 1, stage: int = 0, **options: Any) -> ModelPart:
        settings = TuneSettings(**{**OPTIONS, **options})
        return make_part(make_layout(llama, settings, stages=stages), settings, stage)

    return make


def batch(number: int = 0) -> dict[str, torch.Tensor]:
    """Micro-batches 0 and 1 have 12 tokens, 2 has 7."""
    micro_batches = make_batches(TuneSettings(**OPTIONS), [12, 12, 7])[0].micro_batches
    return sorted((m.tensors() for m in micro_batches), key=lambda t: -t["labels"].shape[1])[number]


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_process_has_the_weights_of_its_stage(
    make: Make, llama: Path, method: str, stage: int
) -> None:
    part = make(stages=2, stage=stage, method=method)
    stored = load_file(llama / "model.safetensors")
    own = {f"model.layers.{stage}"}
    own |= {"model.norm", "lm_head"} if stage else {"model.embed_tokens"}
    for name, parameter in part.model.named_parameters():
        is_own = any(name.startswith(f"{entry}.") for entry in own)
        assert parameter.device == torch.device(f"vgpu:{stage}" if is_own else "meta"), name
        published = name.replace(".base_layer", "")
        if is_own and published in stored:
            assert torch.equal(parameter.detach().cpu(), stored[published]), name
        assert (name in part.trained) == (is_own and parameter.requires_grad)
        assert parameter.requires_grad == (method == "full" or "lora_" in name)
    assert set(part.trained) < set(part.all_trained)
    assert part.model.training


def test_adapters_begin_the_same_however_the_model_is_cut(make: Make) -> None:
    whole = make(seed=3).trained
    halves = {**make(stages=2, seed=3).trained, **make(stages=2, stage=1, seed=3).trained}
    assert halves.keys() == whole.keys()
    assert all(torch.equal(value.detach().cpu(), whole[name]) for name, value in halves.items())
    other = make(seed=4).trained
    assert not any(torch.equal(other[name], whole[name]) for name in whole if "lora_A" in name)


@pytest.mark.parametrize(("method", "frozen"), [("lora", torch.bfloat16), ("full", torch.float32)])
def test_what_is_trained_is_in_32_bit(make: Make, method: str, frozen: torch.dtype) -> None:
    part = make(method=method, dtype="bfloat16")
    assert {parameter.dtype for parameter in part.trained.values()} == {torch.float32}
    assert part.model.lm_head.weight.dtype == frozen
    part.loss(batch(), part.device).backward()
    assert {p.grad.dtype for p in part.trained.values() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 0.02)])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_loss_is_that_of_the_plain_model(
    make: Make, llama: Path, method: str, dtype: str, tolerance: float
) -> None:
    expected = AutoModelForCausalLM.from_pretrained(llama)(**batch(), use_cache=False).loss
    part = make(method=method, dtype=dtype)
    loss = part.loss(batch(), part.device).detach()
    assert float(loss) == pytest.approx(float(expected.detach()), rel=tolerance)


def test_a_form_of_batches_is_looked_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    find = module.find_route
    monkeypatch.setattr(module, "find_route", lambda *args: calls.append(1) or find(*args))
    part = make(stages=2)
    with torch.no_grad():  # an evaluation may come first, and gradients still have a way back
        route = part.route(batch(0))
    assert any(transfer.requires_grad for transfer in route.transfers)
    assert part.route(batch(1)) is route
    assert part.route(batch(2)) is not route
    assert len(calls) == 2
    assert route.devices == ("vgpu:0", "vgpu:1")

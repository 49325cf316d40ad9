"""Models too big for real numbers: proved on a small twin, or not at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import duoka
from duoka.checker.fix.verify import twin_of
from duoka.checker.subject import Subject

LAYERS = 6


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=32,
        intermediate_size=1000,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        pad_token_id=1999,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).eval()


def split(at: int) -> dict[str, int]:
    """Everything up to a layer on one device, the rest on another."""
    layers = {f"model.layers.{layer}": int(layer > at) for layer in range(LAYERS)}
    ends = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    return ends | layers


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duoka.checker.fix.verify.REAL_BYTES", 0)


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_is_small")
@pytest.mark.parametrize("train", [False, True])
def test_a_big_model_is_proved_on_its_twin(train: bool) -> None:
    placement = split(3) | {"model.layers.2.mlp": 1}
    workload = duoka.Workload(prompt_tokens=12, new_tokens=6)
    report = duoka.check(llama(), placement, workload=workload, train=train)
    repairs = duoka.repair(report)
    [patch] = repairs
    assert patch.proved, patch.reason
    assert patch.reason == "on a smaller model with 5 layers and the same code"
    assert (
        "+        hidden_states = residual.to(hidden_states.device) + hidden_states" in patch.diff
    )


@pytest.mark.usefixtures("nothing_is_small")
def test_what_its_inputs_are_given_for_has_no_twin() -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    report = duoka.check(llama(), split(3) | {"model.layers.2.mlp": 1}, inputs={"input_ids": ids})
    [patch] = duoka.repair(report)
    assert not patch.proved
    assert "too large to compare results with real numbers" in patch.reason


def subject(model: nn.Module, entries: dict[str, int]) -> Subject:
    return Subject(
        model=model, name="", entries=tuple((name, f"cuda:{at}") for name, at in entries.items())
    )


def test_a_twin_has_a_layer_of_each_kind() -> None:
    twin = twin_of(subject(llama(), split(3) | {"model.layers.2.mlp": 1}))
    assert twin is not None
    small, num_layers = twin
    assert num_layers == 5  # 0 (and 1), 2, 3, 4, and the last
    devices = dict(small.entries)
    assert devices["model.layers.1.mlp"] == "cuda:1"
    assert devices["model.layers.2"] == "cuda:0"
    assert devices["model.layers.3"] == "cuda:1"
    assert "model.layers.5" not in devices
    model = small.model
    assert isinstance(model, PreTrainedModel)
    assert model.config.hidden_size == 32
    assert model.config.vocab_size == 512
    assert all(each.is_meta for each in model.parameters())  # filled when it is run


def test_one_device_for_all_makes_a_twin_of_two_layers() -> None:
    twin = twin_of(subject(llama(), {"": 0}))
    assert twin is not None
    assert twin[1] == 2


def test_other_modules_have_no_twin() -> None:
    assert twin_of(subject(nn.Linear(2, 2), {"": 0})) is None

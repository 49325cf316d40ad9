"""From a model to its profile for training: forecast and measured are one."""

from __future__ import annotations

from typing import Any

import pytest
import rehearsing
import torch
from torch import nn

from duoka import models
from duoka.errors import ModelError
from duoka.tracing import Subject
from duoka.tracing import training as tracing
from duoka.workload import Conditions, Training

from .. import tiny

FULL = {"method": "full"}
LEAN = {"gradient_checkpointing": True, "master_weights": True}


def hold(name: str, workload: Any, cuts: list[int]) -> None:
    profile = rehearsing.traced(name, workload.conditions)
    measured = rehearsing.measure(name, profile, workload, cuts)
    for told, (allocated, reserved) in zip(
        rehearsing.forecast(profile, workload, cuts), measured, strict=True
    ):
        # Labels are copied to the head's GPU by the model's own code: that much is missing.
        assert told.allocated == pytest.approx(allocated, rel=1e-3)
        assert 0.99 * reserved <= told.reserved <= 1.03 * reserved


@pytest.mark.parametrize("cuts", [[], [3], [2, 4]])
@pytest.mark.parametrize(
    "workload",
    [
        rehearsing.load(500, **FULL),
        rehearsing.load(384, batch=3, optimizer="sgd", **FULL),
        rehearsing.load(97, batch=2, micro_batches=3, **FULL),
        rehearsing.load(200, micro_batches=3, schedule="gpipe", **FULL),
        rehearsing.load(200, micro_batches=5, schedule="1f1b", **FULL),
    ],
)
def test_a_forecast_is_what_training_takes(workload: Any, cuts: list[int]) -> None:
    hold("glm", workload, cuts)


@pytest.mark.parametrize("cuts", [[], [2, 4]])
def test_adapters_checkpoints_and_master_weights(cuts: list[int]) -> None:
    hold("tied", rehearsing.load(300, batch=2, lora_rank=4, **LEAN), cuts)


def test_experts_in_training() -> None:
    hold("experts", rehearsing.load(300, batch=2, **FULL), [3])


@pytest.mark.parametrize("tokens", [400, 700])
def test_windows_in_training(tokens: int) -> None:
    hold("window", rehearsing.load(tokens, **FULL), [3])


def test_what_is_left_out_is_what_would_have_been_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conditions = rehearsing.load(8, **FULL).conditions
    monkeypatch.setattr(tracing._Tracer, "skip", False, raising=False)
    whole = trace("glm", conditions)
    assert whole == rehearsing.traced("glm", conditions)


def trace(name: str, conditions: Conditions) -> Any:
    model = models.build(tiny.CONFIGS[name], dtype=torch.bfloat16)
    subject = Subject(fingerprint=name, conditions=conditions)
    return tracing.trace_training(model, subject, torch.bfloat16)


def test_blocks_have_the_names_of_the_model_without_adapters() -> None:
    conditions = rehearsing.load(8, lora_rank=4, **LEAN).conditions
    profile = rehearsing.traced("tied", conditions)
    names = [name for block in profile.blocks for name in block.modules]
    assert "model.layers.0" in names
    assert not any("lora" in name or "base_layer" in name for name in names)
    trained = [sum(profile.kinds[block.kind].trained_bytes) for block in profile.blocks]
    weights = [sum(profile.kinds[block.kind].weight_bytes) for block in profile.blocks]
    # Adapters in float32: two matrices of rank 4 beside each of the seven linear layers.
    inner, hidden, wide, narrow = 768, 256, 256, 128
    per_layer = 4 * 4 * (2 * (hidden + wide) + 2 * (hidden + narrow) + 3 * (hidden + inner))
    assert trained == [0, *[per_layer] * 4, 0, 0]
    assert all(weight > each for weight, each in zip(weights[:-1], trained, strict=False))
    assert profile.dtype == "bfloat16"


def test_a_workload_that_follows_no_rule_is_traced_alone() -> None:
    workload = rehearsing.load(40, batch=2, **FULL)
    model = models.build(tiny.CONFIGS["glm"], dtype=torch.bfloat16)
    subject = Subject(fingerprint="glm", conditions=workload.conditions)
    profile = tracing.trace_training_workload(model, subject, workload)
    told = rehearsing.forecast(profile, workload, [3])
    rules = rehearsing.traced("glm", workload.conditions)
    assert told == rehearsing.forecast(rules, workload, [3])


class Mute(nn.Module):
    """A model that computes no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.config = type("Config", (), {})()

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
        return type("Output", (), {"loss": None, "logits": self.inner(input_ids.float()[..., :4])})


def test_a_model_without_a_loss_is_refused() -> None:
    subject = Subject(fingerprint="x", conditions=Conditions(training=Training(method="full")))
    with pytest.raises(ModelError, match="computes no loss"):
        tracing.trace_training(Mute(), subject, torch.float32)

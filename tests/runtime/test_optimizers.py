"""Optimizers: what they train, what they hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from duoka import virtual
from duoka.errors import UsageError
from duoka.forecast.optimizer_memory import TrainedTensor, shared_bytes, state_bytes
from duoka.forecast.workload import OPTIMIZERS, Optimizer
from duoka.runtime.optimizers import make_optimizer, update


class Parts(nn.Module):
    """Parameters of several shapes: stacked and plain matrices, a vector, one for 8-bit states."""

    def __init__(self) -> None:
        super().__init__()
        for number, shape in enumerate([(3, 8, 4), (64, 65), (9,), (4096,), (2, 2048)]):
            self.register_parameter(f"p{number}", nn.Parameter(torch.ones(shape)))

    def loss(self) -> torch.Tensor:
        return torch.stack([p.square().sum() for p in self.parameters()]).sum()


def as_trained(parameter: torch.Tensor) -> TrainedTensor:
    return TrainedTensor(shape=tuple(parameter.shape), item_bytes=parameter.itemsize)


def trained(device: str, optimizer: Optimizer, dtype: torch.dtype = torch.float32) -> Parts:
    model = Parts().to(device, dtype)
    made = make_optimizer(model, optimizer, lr=0.01)
    for _ in range(3):
        model.loss().backward()
        update(made)
        made.zero_grad()
    return model


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_states_are_as_large_as_forecast(optimizer: Optimizer) -> None:
    model = Parts().to(torch.bfloat16)
    made = make_optimizer(model, optimizer)
    model.loss().backward()
    made.step()
    for parameter in model.parameters():
        states = [
            state.nbytes
            for name, state in made.state[parameter].items()
            if isinstance(state, torch.Tensor) and name != "step" and not name.startswith("qmap")
        ]
        assert states == list(state_bytes(optimizer, as_trained(parameter)))
    tables = {state["qmap1"] for state in made.state.values() if "qmap1" in state}
    shared = shared_bytes(optimizer, map(as_trained, model.parameters()))
    assert [table.nbytes for table in tables] == list(shared[:1])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_virtual_gpus_compute_what_the_cpu_does(optimizer: Optimizer) -> None:
    before = Parts().loss().item()
    expected = trained("cpu", optimizer)
    assert expected.loss().item() < before
    with virtual.gpus([None], data="cpu"):
        found = trained("vgpu:0", optimizer)
        for one, other in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_runs_without_data(optimizer: Optimizer) -> None:
    with virtual.gpus([None], data="meta"):
        trained("vgpu:0", optimizer, torch.bfloat16)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "adafactor"])
def test_matrices_decay_and_vectors_do_not(optimizer: Optimizer) -> None:
    model = Parts()
    made = make_optimizer(model, optimizer, lr=0.5, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.step()
    for parameter in model.parameters():
        decayed = 0.75 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, decayed))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_frozen_or_elsewhere_is_left_alone(optimizer: Optimizer) -> None:
    model = Parts()
    model.p0.requires_grad_(False)
    model.p1 = nn.Parameter(torch.ones(2, 2, device="meta"))
    made = make_optimizer(model, optimizer)
    held = [id(p) for group in made.param_groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, (model.p2, model.p3, model.p4)))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    make_optimizer(model, optimizer).step()  # a stage may have nothing to train


def test_what_cannot_be_made_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        return None

    monkeypatch.setattr("duoka.base.requirements.find_spec", missing)
    with pytest.raises(UsageError, match="adamw8bit needs bitsandbytes"):
        make_optimizer(Parts(), "adamw8bit")

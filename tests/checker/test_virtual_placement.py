from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from duoka import virtual
from duoka.checker.virtual_placement import put_on_virtual_gpus


@pytest.fixture(autouse=True)
def world() -> virtual.World:
    return virtual.set_gpus([None, None])


def put_on_first(model: nn.Module) -> None:
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    put_on_virtual_gpus(model, dict.fromkeys(names, torch.device("vgpu", 0)), {})


def test_parameters_are_the_same_objects_with_other_contents() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    weight = model[0].weight
    weight.grad = torch.ones(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    put_on_first(model)
    assert model[0].weight is weight is optimizer.param_groups[0]["params"][0]
    assert weight.device == torch.device("vgpu", 0)
    assert isinstance(weight, nn.Parameter)
    assert weight.grad is None
    model(torch.ones(2, 3, device="vgpu:0")).sum().backward()
    assert weight.grad is not None
    assert model[1].running_mean.device == torch.device("vgpu", 0)


def test_ties_are_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    put_on_first(model)
    assert model[1].weight is model[0].weight
    assert model[1].weight.device.type == "vgpu"


def test_what_somebody_holds_weakly_is_another_object() -> None:
    model = nn.Linear(3, 3)
    weight = model.weight
    watcher = weakref.ref(weight)
    put_on_first(model)
    assert model.weight.device.type == "vgpu"
    assert watcher() is weight
    assert weight.device.type == "cpu"

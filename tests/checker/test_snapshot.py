from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from duoka import virtual
from duoka.checker.snapshot import on_virtual_gpus


@pytest.fixture(autouse=True)
def world() -> virtual.World:
    return virtual.set_gpus([None, None])


def on_first(model: nn.Module) -> dict[str, torch.device]:
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    return dict.fromkeys(names, torch.device("vgpu", 0))


def test_parameters_are_the_same_objects_with_other_contents() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    weight, data = model[0].weight, model[0].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with on_virtual_gpus(model, on_first(model), {}):
        assert model[0].weight is weight is optimizer.param_groups[0]["params"][0]
        assert weight.device == torch.device("vgpu", 0)
        assert isinstance(weight, nn.Parameter)
        model(torch.ones(2, 3, device="vgpu:0")).sum().backward()
        assert weight.grad is not None
        assert model[1].running_mean.device == torch.device("vgpu", 0)
    assert weight.device.type == "cpu"
    assert type(weight) is nn.Parameter
    assert weight.grad is None
    assert torch.equal(weight, data)
    assert model[1].running_mean.tolist() == [0.0, 0.0, 0.0]
    assert model[1].num_batches_tracked.item() == 0


def test_ties_are_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    with on_virtual_gpus(model, on_first(model), {}):
        assert model[1].weight is model[0].weight
    assert model[1].weight is model[0].weight


def test_what_somebody_holds_weakly_comes_back_too() -> None:
    model = nn.Linear(3, 3)
    weight = model.weight
    watcher = weakref.ref(weight)
    with on_virtual_gpus(model, on_first(model), {}):
        assert model.weight.device.type == "vgpu"
    assert model.weight is weight is watcher()
    assert weight.device.type == "cpu"


def test_contents_are_safe_where_a_graph_of_the_run_is_kept() -> None:
    model = nn.Linear(3, 3)
    data = model.weight.detach().clone()
    kept = []
    with on_virtual_gpus(model, on_first(model), {}):
        kept.append(model(torch.ones(1, 3, device="vgpu:0")))
    assert model.weight.device.type == "cpu"
    assert torch.equal(model.weight, data)
    assert kept

"""Parameters and buffers on their devices: complete or refused, once each, ties kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from duoka.errors import ModelError, PlacementError
from duoka.planner.placement import Placement
from duoka.runtime.dispatch.place_tensors import place, refuse_meta, tensor_names


class Tied(nn.Module):
    """An embedding, a buffer of each kind, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.norm = nn.Linear(2, 2)
        self.norm.register_buffer("scale", torch.full((2,), 3.0))
        self.norm.register_buffer("angles", torch.full((2,), 5.0), persistent=False)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight


SPLIT = Placement(entries=(("embed", "meta"), ("norm", "cpu"), ("head", "meta")))


def test_everything_lies_where_the_placement_says() -> None:
    model = Tied()
    place(model, SPLIT)
    assert {name: tensor.device.type for name, tensor in tensor_names(model)} == {
        "embed.weight": "meta",
        "norm.weight": "cpu",
        "norm.bias": "cpu",
        "norm.scale": "cpu",
        "norm.angles": "cpu",
        "head.weight": "meta",
    }


def test_ties_names_and_persistence_are_kept() -> None:
    model, twin = Tied(), Tied()
    place(model, SPLIT)
    assert model.head.weight is model.embed.weight
    assert [name for name, _ in tensor_names(model)] == [name for name, _ in tensor_names(twin)]
    assert list(model.state_dict()) == list(twin.state_dict())
    assert len(list(model.parameters())) == len(list(twin.parameters()))


def test_what_is_at_home_stays_the_same_object() -> None:
    model = Tied()
    before = {name: id(tensor) for name, tensor in tensor_names(model)}
    place(model, Placement(entries=(("", "cpu"),)))
    assert {name: id(tensor) for name, tensor in tensor_names(model)} == before


def test_a_moved_parameter_keeps_its_marks() -> None:
    model = Tied()
    model.norm.weight.requires_grad_(False)
    model.norm.weight.origin = "adapter"
    place(model, Placement(entries=(("", "meta"),)))
    assert not model.norm.weight.requires_grad
    assert model.norm.bias.requires_grad
    assert model.norm.weight.origin == "adapter"
    assert isinstance(model.norm.weight, nn.Parameter)


def test_gradients_move_along() -> None:
    model = Tied()
    model.norm(torch.ones(1, 2)).sum().backward()
    place(model, Placement(entries=(("", "meta"),)))
    assert model.norm.weight.grad is not None
    assert model.norm.weight.grad.device.type == "meta"


def test_without_data_parameters_are_allocated() -> None:
    with torch.device("meta"):
        model = Tied()
    place(model, Placement(entries=(("", "cpu"),)))
    assert {tensor.device.type for _, tensor in tensor_names(model)} == {"cpu"}
    assert model.head.weight is model.embed.weight


def test_an_incomplete_placement_names_all_that_is_missing_and_moves_nothing() -> None:
    model = Tied()
    with pytest.raises(PlacementError) as caught:
        place(model, Placement(entries=(("embed", "meta"), ("ghost", "cpu"))))
    assert caught.value.missing == (
        "norm.weight",
        "norm.bias",
        "norm.scale",
        "norm.angles",
        "head.weight",
    )
    assert caught.value.unknown == ("ghost",)
    assert {tensor.device.type for _, tensor in tensor_names(model)} == {"cpu"}


def test_a_tie_over_two_devices_is_refused_by_all_its_names() -> None:
    model = Tied()
    with pytest.raises(PlacementError, match="tied") as caught:
        place(model, Placement(entries=(("", "cpu"), ("head", "meta"))))
    assert caught.value.doubled == ("embed.weight", "head.weight")


def test_a_model_without_data_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(3)))
    with pytest.raises(ModelError, match=r"6 parameters .*: 0\.weight, .*, 2\.weight, …"):
        refuse_meta(model)

from __future__ import annotations

import torch
from torch import nn

from duoka.base.text import value_of
from duoka.checker.subject import (
    complete_map,
    device_name,
    placed_modules,
    read_entries,
    tensor_devices,
)


def model() -> nn.Module:
    return nn.ModuleDict(
        {
            "embed": nn.Embedding(3, 2),
            "layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
            "head": nn.Linear(2, 3),
        }
    )


def test_devices_are_spelled_in_many_ways() -> None:
    ways = [0, "0", "cuda", "cuda:0", torch.device("cuda", 0)]
    assert {device_name(way) for way in ways} == {"cuda:0"}
    assert device_name("cpu") == "cpu"
    assert read_entries({"a": 3}) == (("a", "cuda:3"),)


def test_the_longest_name_decides() -> None:
    entries = {"": "cuda:0", "layers": "cuda:1", "layers.1.bias": "cuda:2"}
    assert value_of("embed.weight", entries) == "cuda:0"
    assert value_of("layers.0.weight", entries) == "cuda:1"
    assert value_of("layers.1.bias", entries) == "cuda:2"
    assert value_of("layers.1", {"embed": "cuda:0"}) is None


def test_a_complete_map_is_taken_as_it_is() -> None:
    entries = (("embed", "cuda:0"), ("layers", "cuda:0"), ("head", "cuda:1"))
    assert complete_map(model(), entries) == (entries, complete_map(model(), entries)[1])
    assert not complete_map(model(), entries)[1]


def test_what_a_map_misses_and_invents_is_listed_and_completed() -> None:
    entries, faults = complete_map(model(), (("embd", "cuda:0"), ("layers.1", "cuda:1")))
    assert faults.unknown == ("embd",)
    assert faults.nearest == {"embd": ("embed",)}
    assert faults.missing == (
        "embed.weight",
        "layers.0.weight",
        "layers.0.bias",
        "head.weight",
        "head.bias",
    )
    assert set(tensor_devices(model(), entries)) == {name for name, _ in model().named_parameters()}


def test_a_tied_tensor_with_two_devices_is_doubled() -> None:
    tied = model()
    tied["head"].weight = tied["embed"].weight
    _, faults = complete_map(tied, (("embed", "cuda:0"), ("layers", "cuda:0"), ("head", "cuda:1")))
    assert faults.doubled == ("embed.weight", "head.weight")


def test_of_a_container_its_parts_are_placed() -> None:
    whole = model()
    placed = placed_modules(whole, (("", "cuda:0"), ("layers.1", "cuda:1")))
    assert placed == {
        whole["embed"]: "cuda:0",
        whole["layers"][0]: "cuda:0",
        whole["layers"][1]: "cuda:1",
        whole["head"]: "cuda:0",
    }

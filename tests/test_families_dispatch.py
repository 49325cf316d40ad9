"""Families of transformers over two virtual GPUs give what they give on one.

Where a model is cut comes from `tracing`, not from names: its blocks, in the order in which they
run, are dealt to the two GPUs, and then again with the roles exchanged.
"""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from duoka import virtual
from duoka.dispatch import dispatch, place, tensor_names
from duoka.placement import Placement
from duoka.tracing.grouping import Group, find_groups

from . import families

ONE = Placement(entries=(("", "vgpu:0"),))


def blocks(model: PreTrainedModel) -> list[Group]:
    # In 16 bit: without data, the kernels for experts take nothing else.
    twin = copy.deepcopy(model).to(torch.bfloat16)
    batch = families.inputs(twin)
    with virtual.gpus([None], data="meta"):
        place(twin, ONE)
        there = {name: value.to("vgpu:0") for name, value in batch.items()}
        return find_groups(twin, lambda: twin(**there))


def halves(model: PreTrainedModel, first: str, second: str) -> Placement:
    """The first half of the blocks on one GPU, the rest on the other; ties with the first."""
    groups = blocks(model)
    device_of: dict[int, str] = {}
    entries: list[tuple[str, str]] = []
    tensors = list(tensor_names(model))
    for number, group in enumerate(groups):
        owned = [id(t) for name, t in tensors if _holds(group, name)]
        device = first if 2 * number < len(groups) else second
        device = next((device_of[key] for key in owned if key in device_of), device)
        device_of |= dict.fromkeys(owned, device)
        entries += [(name, device) for name in group.names]
    return Placement(entries=tuple(entries))


def _holds(group: Group, name: str) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") or not entry for entry in group.names)


@pytest.mark.parametrize("name", families.FAST)
def test_two_gpus_are_one(name: str) -> None:
    virtual.set_gpus([None, None])
    model = families.build(name)
    expected = families.measure(dispatch(copy.deepcopy(model), ONE), "vgpu:0")
    for first, second in (("vgpu:0", "vgpu:1"), ("vgpu:1", "vgpu:0")):
        spread = dispatch(copy.deepcopy(model), halves(model, first, second))
        used = {str(tensor.device) for _, tensor in tensor_names(spread)}
        assert used == {"vgpu:0", "vgpu:1"}, "nothing was cut"
        found = families.measure(spread, first)
        assert not families.differences(expected, found, tolerance=1e-6)

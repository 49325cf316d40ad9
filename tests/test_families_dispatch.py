"""Families of transformers over two virtual GPUs give what they give on one.

Where a model is cut comes from `tracing`, not from names: its blocks, in the order in which they
run, are dealt to the two GPUs, and then again with the roles exchanged.
"""

from __future__ import annotations

import copy

import pytest
from transformers import PreTrainedModel

from duoka import virtual
from duoka.dispatching import dispatch, place, tensor_names
from duoka.placement import Placement
from duoka.tracing.grouping import Group, find_groups

from . import families

# The model's own loss brings labels and logits together nowhere.
LOSS_ON_ONE_DEVICE = ("cpmant",)
# Its layers are parts in lists beside each other, so residuals in the model's own code span all.
ONE_BLOCK = ("xlm",)
UNBUILT = [name for names in families.UNBUILT.values() for name in names]
NOT_HELD = {*LOSS_ON_ONE_DEVICE, *ONE_BLOCK, *UNBUILT}
OTHERS = [n for n in families.all_names() if n not in NOT_HELD and n not in families.FAST]
ONE = Placement(entries=(("", "vgpu:0"),))


def blocks(model: PreTrainedModel) -> list[Group]:
    twin = copy.deepcopy(model)
    batch = families.inputs(twin)
    with virtual.gpus([None]):
        place(twin, ONE)
        there = {name: value.to("vgpu:0") for name, value in batch.items()}
        return find_groups(twin, lambda: twin(**there))


def halves(model: PreTrainedModel, first: str, second: str) -> Placement:
    """The first half of the blocks on one GPU, the rest on the other; ties with the first."""
    groups = blocks(model)
    tensors = [(name, id(tensor)) for name, tensor in tensor_names(model)]
    owned = [{key for name, key in tensors if _holds(group, name)} for group in groups]
    roots = list(range(len(groups)))
    for _ in groups:  # a block may be tied to one that is itself tied
        for number, keys in enumerate(owned):
            tied = [n for n, other in enumerate(owned) if other & keys]
            roots[number] = min(roots[n] for n in [number, *tied])
    devices = [first if 2 * root < len(groups) else second for root in roots]
    return Placement(
        entries=tuple(
            (name, device)
            for group, device in zip(groups, devices, strict=True)
            for name in group.names
        )
    )


def _holds(group: Group, name: str) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") or not entry for entry in group.names)


@pytest.mark.parametrize("name", families.FAST)
def test_two_gpus_are_one(name: str) -> None:
    check(name)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OTHERS)
def test_two_gpus_are_one_for_others(name: str) -> None:
    check(name)


def check(name: str) -> None:
    virtual.set_gpus([None, None])
    model = families.build(name)
    expected = families.measure(dispatch(copy.deepcopy(model), ONE), "vgpu:0")
    for first, second in (("vgpu:0", "vgpu:1"), ("vgpu:1", "vgpu:0")):
        spread = dispatch(copy.deepcopy(model), halves(model, first, second))
        used = {str(tensor.device) for _, tensor in tensor_names(spread)}
        assert used == {"vgpu:0", "vgpu:1"}, "nothing was cut"
        found = families.measure(spread, first)
        assert not families.differences(expected, found, tolerance=1e-6)

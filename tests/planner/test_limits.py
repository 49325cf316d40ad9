"""Constraints in the names of a model and its checkpoint, against its blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
from tiny import MIB

from duoka import Fleet, Workload
from duoka.errors import FleetError, UsageError
from duoka.forecast.profile import Profile
from duoka.forecast.tensor_names import NamedTensor
from duoka.hardware.device import Device
from duoka.planner.constraints import Constraints
from duoka.planner.limits import limits_for, on_fleet, usable
from duoka.planner.request import PlanRequest
from duoka.planner.search import PlacementLimits

FLEET = tiny.fleet(100, 100, 100)


def named(*modules: str, tied: dict[int, int] | None = None) -> Profile:
    """A profile whose blocks are called so; each holds two tensors, published in capitals."""
    tied = tied or {}
    profile = tiny.made_up([MIB] * len(modules), tied_to=tied)
    blocks = tuple(
        replace(block, modules=(name,)) for block, name in zip(profile.blocks, modules, strict=True)
    )
    tensors = [
        [
            NamedTensor(name=f"{name}.a", num_bytes=8, published=(f"{name.upper()}.A",)),
            NamedTensor(name=f"{name}.b", num_bytes=8, published=(f"{name.upper()}.B",)),
        ]
        for name in modules
    ]
    tensor_names = tuple(map(tuple, tensors))
    return replace(profile, blocks=blocks, tensor_names=tensor_names)


MODEL = named("embed", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "head")
TIED = named("embed", "layers.0", "layers.1", "norm", "head", tied={4: 0})


def limits(profile: Profile = MODEL, **values: object) -> PlacementLimits:
    return limits_for(Constraints(**values), profile, FLEET)  # type: ignore[arg-type]


def test_nothing_is_demanded_by_default() -> None:
    assert not limits()


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("head", [6]),
        ("head.a", [6]),
        ("layers.2", [3]),
        ("LAYERS.2.B", [3]),
        ("LAYERS.2", [3]),
        ("layers", [1, 2, 3, 4]),
    ],
)
def test_a_pin_names_any_module_or_tensor(name: str, blocks: list[int]) -> None:
    assert limits(pins=((name, "vgpu:1"),)).pins == tuple((block, 1) for block in blocks)


def test_a_device_may_be_named_by_its_number() -> None:
    assert limits(pins=(("head", "2"),)).pins == ((6, 2),)


def test_a_pin_of_a_tied_block_is_one_of_its_partner() -> None:
    assert limits(TIED, pins=(("head", "vgpu:2"),)).pins == ((0, 2),)


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"pins": (("", "0"),)}, "no module or tensor ''", "lists the modules"),
        ({"pins": (("head", ""),)}, "'' is not one of these GPUs", "vgpu:0, vgpu:1, vgpu:2"),
        ({"pins": (("haed", "0"),)}, "no module or tensor 'haed'", "did you mean head?"),
        (
            {"pins": (("head", "vgpu:7"),)},
            "'vgpu:7' is not one of these GPUs",
            "vgpu:0, vgpu:1, vgpu:2",
        ),
        (
            {"pins": (("haed", "7"),)},
            "the pin haed=7: '7' is not one of these GPUs",
            "the devices are",
        ),
        ({"pins": (("head.a", "0"), ("head.b", "1"))}, "of the same block, on vgpu:0", "one"),
    ],
)
def test_what_cannot_be_understood_is_refused(
    values: dict[str, object], message: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        limits(**values)
    assert hint in str(caught.value.hint)


def test_pins_of_tied_blocks_agree() -> None:
    with pytest.raises(UsageError, match="embed, which is tied to it"):
        limits(TIED, pins=(("embed", "0"), ("head", "1")))


def test_what_is_reserved_is_taken_off_the_budget() -> None:
    asked = Constraints(reserve=(("1", 30 * MIB), ("cuda:0", MIB)))
    fleet = usable(Fleet.parse("100MiB,100MiB"), asked)
    assert [device.budget_bytes // MIB for device in fleet.devices] == [99, 70]
    assert [device.reserve_bytes // MIB for device in fleet.devices] == [1, 30]
    assert usable(fleet, Constraints()) is fleet


def test_a_reserve_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(FleetError, match=r"whose budget is 100.00 MiB: no memory remains"):
        usable(FLEET, Constraints(reserve=(("vgpu:0", 100 * MIB),)))
    with pytest.raises(UsageError, match="not one of these GPUs"):
        usable(FLEET, Constraints(reserve=(("cuda:5", MIB),)))
    with pytest.raises(UsageError, match="reserve of vgpu:0 is given twice"):
        usable(FLEET, Constraints(reserve=(("vgpu:0", MIB), ("0", MIB))))


# ── host memory ──


def test_a_fleets_host_becomes_part_of_the_request() -> None:
    fleet = Fleet.parse("virtual:2x1GiB")
    declared = fleet.with_host("7GiB,50GB/s")
    problem = on_fleet(PlanRequest(workload=Workload()), declared)
    assert (problem.fleet, problem.request.host) == (fleet, declared.host)
    streaming = PlanRequest(workload=Workload(), constraints=Constraints(offload=True))
    problem = on_fleet(streaming, declared)
    assert (problem.fleet, problem.request.host) == (declared, declared.host)
    again = on_fleet(problem.request, fleet)
    assert again == problem
    cpu = Device(name="cpu", budget_bytes=30 * 2**30)
    limited = Fleet(devices=(*Fleet.parse("virtual:1GiB").devices, cpu))
    problem = on_fleet(PlanRequest(workload=Workload()), limited)
    assert (problem.fleet, problem.request.host) == (limited, None)

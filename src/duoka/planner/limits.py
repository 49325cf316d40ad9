"""Limits: a person's constraints for the blocks of one model and the GPUs of one fleet.

Names are those of the model or of its checkpoint, of any module or tensor. Memory is unknown here:
whether a placement that obeys the constraints fits is for the search to find.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from duoka.base.text import choose
from duoka.errors import FleetError, UsageError
from duoka.forecast.allocator import refuse_options
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Workload
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet
from duoka.hardware.host import available_bytes

from .constraints import Constraints
from .device_map import DeviceMap, Spelling, find_device
from .plan import Plan
from .request import LARGEST, PlanProblem, PlanRequest
from .search import PlacementLimits


def fleet_for(fleet: Fleet, device_map: DeviceMap | None, *, offload: bool = False) -> Fleet:
    """Add the CPU to a fleet if needed and without a budget of its own.

    A device map may name it; and offloaded weights need it if the GPUs are this machine's: of
    another machine the memory of the host is unknown.
    """
    is_named = device_map is not None and device_map.names_cpu
    is_present = offload and any(device.uuid for device in fleet.devices)
    if "cpu" in fleet.names or not (is_named or is_present):
        return fleet
    budget = available_bytes()
    if not budget:
        raise FleetError(
            "the CPU memory budget is unknown",
            hint='give a budget: Fleet.from_max_memory({0: "24GiB", "cpu": "30GiB"})',
        )
    return replace(fleet, devices=(*fleet.devices, Device(name="cpu", budget_bytes=budget)))


def on_fleet(
    request: PlanRequest, fleet: Fleet | str, device_map: DeviceMap | None = None
) -> PlanProblem:
    """Put a request on a fleet; a text is read by `Fleet.parse`."""
    for name, value, kind in (
        ("fleet", fleet, Fleet | str),
        ("workload", request.workload, Workload),
        ("constraints", request.constraints, Constraints),
    ):
        if not isinstance(value, kind):
            raise UsageError(
                f"{name} can't be {type(value).__name__}", hint=f"give duoka.{name.title()}(…)"
            )
    if request.largest is not None:
        choose("largest", request.largest, LARGEST)
    fleet = Fleet.parse(fleet) if isinstance(fleet, str) else fleet
    # A UUID means a GPU of this machine, on which this process may allocate with its options.
    if any(device.uuid for device in fleet.devices):
        refuse_options()
    fleet = fleet_for(fleet, device_map, offload=request.constraints.offload)
    for name, target in request.constraints.pins:
        with _naming_pin(name, target):
            find_device(target, fleet)
    # The generation decides on bytes: of cuBLAS's workspace, and of attention before Ampere.
    workload = replace(request.workload, gpu_generation=fleet.gpu_generation)
    request = replace(request, workload=workload)
    return PlanProblem.of(request, usable(fleet, request.constraints), device_map)


@contextmanager
def _naming_pin(name: str, target: str) -> Iterator[None]:
    """Name the pin in errors."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"the pin {name}={target}: {error}", hint=error.hint) from None


def limits_for(constraints: Constraints, profile: Profile, fleet: Fleet) -> PlacementLimits:
    """Translate pins to the device of each pinned block, by its place in the chain."""
    # The search cuts a chain without tied blocks: those are on the device of their root. Example:
    # blocks 0 embedding, 1 and 2 layers, 3 head tied to 0; the chain is [0, 1, 2].
    #
    #   pin                          blocks    root's place in the chain
    #   lm_head=cuda:1               3         0: the embedding goes to cuda:1 as well
    #   model.layers=cuda:0          1, 2      1 and 2
    #   model.embed_tokens=cuda:0    0         0: contradicts the first pin, and is refused
    if not constraints.pins:
        return PlacementLimits()
    spelling = Spelling(profile.outline)
    chain = [index for index, block in enumerate(profile.blocks) if block.tied_to is None]
    pinned: dict[int, tuple[int, str]] = {}
    for name, target in constraints.pins:
        with _naming_pin(name, target):
            device = fleet.names.index(find_device(target, fleet))
            blocks = spelling.blocks_of(name)
            if not blocks:
                nearest = ", ".join(spelling.finder.search(name).names)
                raise UsageError(
                    f"{profile.model} has no module or tensor {name[:120]!r}",
                    hint=f"did you mean {nearest}?"
                    if nearest
                    else "`duoka plan` lists the modules",
                )
        for block in blocks:
            place = chain.index(profile.root_of(block))
            other_device, other_name = pinned.setdefault(place, (device, name))
            if other_device != device:
                is_tied = profile.blocks[block].tied_to is not None
                raise UsageError(
                    f"{name} is pinned to {fleet.names[device]}, but {other_name}, which is "
                    f"{'tied to it' if is_tied else 'of the same block'}, on "
                    f"{fleet.names[other_device]}",
                    hint="remove one of the two pins",
                )
    return PlacementLimits(pins=tuple((place, device) for place, (device, _) in pinned.items()))


# A reserve is taken off a budget once, when a request meets a fleet (`usable`), so that the search,
# the forecast and the check all see the smaller budget. The plan keeps the smaller budget and the
# request with the reserve; planning again starts from `given_back`, or it would be taken off twice.
# Example: 24 GiB and a reserve of 2 GiB: the plan's fleet has 22 GiB, `given_back` has 24 GiB.
def reserves(constraints: Constraints, fleet: Fleet) -> Mapping[str, int]:
    """Return the bytes to take off the budgets, by the names of the fleet's devices."""
    sizes: dict[str, int] = {}
    for device, size in constraints.reserve:
        name = find_device(device, fleet)
        if name in sizes:
            raise UsageError(f"the reserve of {name} is given twice", hint="give it once")
        sizes[name] = size
    return sizes


def usable(fleet: Fleet, constraints: Constraints) -> Fleet:
    """Take the reserved bytes off the budgets of a fleet."""
    return fleet.reserving(reserves(constraints, fleet)) if constraints.reserve else fleet


def given_back(plan: Plan) -> Fleet:
    """Add the reserved bytes to the budgets of a plan's fleet again."""
    reserved = reserves(plan.request.constraints, plan.fleet)
    return plan.fleet.reserving({name: -size for name, size in reserved.items()})

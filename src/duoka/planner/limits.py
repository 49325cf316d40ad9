"""Limits: what a person's constraints mean for the blocks of one model and the GPUs of one fleet.

Names are those of the model or of its checkpoint, of any module or tensor. It knows nothing of
memory: whether a placement that obeys fits is for the search to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """The fleet, with the CPU where it is needed and nobody gave it a budget.

    That is where a device map names it; and, for weights that are offloaded, where the GPUs are
    this machine's: of another one it isn't known how much memory its processor has.
    """
    named = device_map is not None and device_map.names_cpu
    is_present = offload and any(device.uuid for device in fleet.devices)
    if "cpu" in fleet.names or not (named or is_present):
        return fleet
    budget = available_bytes()
    if not budget:
        raise FleetError(
            "how much memory the CPU may use isn't known",
            hint='give it a budget: Fleet.from_max_memory({0: "24GiB", "cpu": "30GiB"})',
        )
    return replace(fleet, devices=(*fleet.devices, Device(name="cpu", budget_bytes=budget)))


def on_fleet(
    request: PlanRequest, fleet: Fleet | str, device_map: DeviceMap | None = None
) -> PlanProblem:
    """The request on a fleet, as it is or as `Fleet.parse` reads it."""
    for what, value, kind in (
        ("fleet", fleet, Fleet | str),
        ("workload", request.workload, Workload),
        ("constraints", request.constraints, Constraints),
    ):
        if not isinstance(value, kind):
            raise UsageError(
                f"{what} can't be {type(value).__name__}", hint=f"give duoka.{what.title()}(…)"
            )
    if request.largest is not None:
        choose("largest", request.largest, LARGEST)
    fleet = Fleet.parse(fleet) if isinstance(fleet, str) else fleet
    if any(device.uuid for device in fleet.devices):
        refuse_options()
    fleet = fleet_for(fleet, device_map, offload=request.constraints.offload)
    for name, target in request.constraints.pins:
        with _of_pin(name, target):
            find_device(target, fleet)
    workload = replace(request.workload, gpu_generation=fleet.gpu_generation)
    request = replace(request, workload=workload)
    return PlanProblem.of(request, usable(fleet, request.constraints), device_map)


@contextmanager
def _of_pin(name: str, target: str) -> Iterator[None]:
    """A scope whose errors tell which pin they are of."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"the pin {name}={target}: {error}", hint=error.hint) from None


def limits_for(
    constraints: Constraints, profile: Profile, chain: Sequence[int], fleet: Fleet
) -> PlacementLimits:
    """What constraints forbid the search."""
    if not constraints.pins:
        return PlacementLimits()
    return PlacementLimits(
        pins=tuple(_Reader(profile, chain).pins(constraints.pins, fleet).items())
    )


class _Reader:
    def __init__(self, profile: Profile, chain: Sequence[int]) -> None:
        self._profile = profile
        self._names = Spelling(profile.outline)
        self._place = {block: place for place, block in enumerate(chain)}

    def pins(self, pins: Sequence[tuple[str, str]], fleet: Fleet) -> dict[int, int]:
        """The device of each place in the chain that has one."""
        devices: dict[int, int] = {}
        said: dict[int, str] = {}
        for name, target in pins:
            with _of_pin(name, target):
                device = fleet.names.index(find_device(target, fleet))
                blocks = self._blocks(name)
            for block in blocks:
                place = self._place[self._profile.root_of(block)]
                if devices.setdefault(place, device) != device:
                    raise UsageError(
                        f"{name} is to be on {fleet.names[device]}, and {said[place]}, which is "
                        f"{self._why_same(block)}, on {fleet.names[devices[place]]}",
                        hint="pin one of the two",
                    )
                said.setdefault(place, name)
        return devices

    def _blocks(self, name: str) -> list[int]:
        """The blocks that hold something of a module or tensor."""
        blocks = self._names.blocks_of(name)
        if not blocks:
            near = self._names.nearest(name)
            raise UsageError(
                f"{self._profile.model} has no module or tensor {name[:120]!r}",
                hint=f"the nearest: {', '.join(near)}"
                if near
                else "`duoka plan` shows its modules",
            )
        return blocks

    def _why_same(self, block: int) -> str:
        tied = self._profile.blocks[block].tied_to is not None
        return "tied to it" if tied else "of the same block"


def reserves(constraints: Constraints, fleet: Fleet) -> Mapping[str, int]:
    """Bytes to take off the budgets, by the names of the fleet's devices."""
    sizes: dict[str, int] = {}
    for device, size in constraints.reserve:
        name = find_device(device, fleet)
        if name in sizes:
            raise UsageError(f"the reserve of {name} is said twice", hint="say it once")
        sizes[name] = size
    return sizes


def usable(fleet: Fleet, constraints: Constraints) -> Fleet:
    """The fleet without what is to be left free on its devices."""
    return fleet.reserving(reserves(constraints, fleet)) if constraints.reserve else fleet


def given_back(plan: Plan) -> Fleet:
    """The fleet of a plan with what was to be left free, as before `usable`."""
    taken = reserves(plan.request.constraints, plan.fleet)
    return plan.fleet.reserving({name: -size for name, size in taken.items()})

"""GPU upgrades: the GPU to add, or to put in the place of another, for a workload to fit.

Sizes are those of real cards; for each size the card is taken that offers the least memory, so that
any other card of the size fits as well. Prices are unknown: less memory is taken to be cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from duoka.base.units import GIB, exact_bytes, format_bytes
from duoka.errors import DuokaError
from duoka.hardware import catalogue
from duoka.hardware.device import MAX_DEVICES, Device
from duoka.hardware.fleet import Fleet
from duoka.hardware.parse import with_more, with_replaced

from .limits import usable
from .plan import Plan
from .request import PlanProblem

_MOST_GPUS = 16

PlanFor = Callable[[PlanProblem], Plan | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """A sufficient fleet, in the words of `Fleet.parse`, and its plan."""

    text: str
    gpus: str
    plan: Plan
    new_bytes: int


def upgrades(problem: PlanProblem, plan_for: PlanFor) -> list[Upgrade]:
    """Find the smallest sufficient card beside the others, or in the place of the smallest.

    Where no single card as large as the largest present would do, also more of the same kind.
    Returned in the order of new memory.
    """
    devices = [device for device in problem.fleet.devices if device.name != "cpu"]
    if not devices:
        return []  # cards that fit such a machine are unknown
    candidates = (
        search(problem, devices, plan_for) for search in (_one_more, _replaced, _more_alike)
    )
    fitting = [upgrade for upgrade in candidates if upgrade is not None]
    return sorted(fitting, key=lambda upgrade: upgrade.new_bytes)


def _max_new(devices: Sequence[Device]) -> int:
    return min(_MOST_GPUS, MAX_DEVICES) - len(devices)


def _one_more(problem: PlanProblem, devices: Sequence[Device], plan_for: PlanFor) -> Upgrade | None:
    """Find the smallest card beside the others."""
    if _max_new(devices) < 1:
        return None
    for card in _cards():
        gpus = with_more(problem.gpus, devices, card.name)
        if plan := _plan_on(gpus, problem, plan_for):
            return _upgrade(f"one more card with {_describe(card)}", gpus, plan, card)
    return None


def _replaced(problem: PlanProblem, devices: Sequence[Device], plan_for: PlanFor) -> Upgrade | None:
    """Find the smallest card in the place of the smallest device.

    No other exchange succeeds with a smaller card: of two fleets that differ by one device, the one
    with the larger device holds whatever the other holds.
    """
    index = min(range(len(devices)), key=lambda number: devices[number].budget_bytes)
    smallest = devices[index]
    for card in _cards():
        (device,) = Fleet.parse(card.name).devices
        if device.budget_bytes <= smallest.budget_bytes:
            continue
        gpus = with_replaced(problem.gpus, devices, index, card.name)
        if plan := _plan_on(gpus, problem, plan_for):
            place = f"in the place of {smallest.name} ({_size_of(smallest)})"
            return _upgrade(f"a card with {_describe(card)}, {place}", gpus, plan, card)
    return None


def _more_alike(
    problem: PlanProblem, devices: Sequence[Device], plan_for: PlanFor
) -> Upgrade | None:
    """Find the number of further GPUs like the largest, two at least."""
    largest = max(devices, key=lambda device: device.budget_bytes)
    for count in range(1, _max_new(devices) + 1):
        gpus = with_more(problem.gpus, devices, _entry(largest), count)
        if plan := _plan_on(gpus, problem, plan_for):
            if count == 1:
                return None  # `_one_more` suggests a card of this size, or a smaller one
            text = f"{count} more GPUs like {largest.name} ({_size_of(largest)})"
            new_bytes = count * largest.budget_bytes
            return Upgrade(text=text, gpus=gpus, plan=plan, new_bytes=new_bytes)
    return None


def _upgrade(text: str, gpus: str, plan: Plan, card: catalogue.Card) -> Upgrade:
    return Upgrade(text=text, gpus=gpus, plan=plan, new_bytes=round(card.memory_gib) * GIB)


def _describe(card: catalogue.Card) -> str:
    return f"{round(card.memory_gib)} GB (such as {card.name})"


def _plan_on(gpus: str, problem: PlanProblem, plan_for: PlanFor) -> Plan | None:
    """Plan for another fleet, read as by the command line."""
    try:
        fleet = usable(Fleet.parse(gpus), problem.constraints)
    except DuokaError:
        return None
    workload = replace(problem.workload, gpu_generation=fleet.gpu_generation)
    return plan_for(replace(problem, fleet=fleet, gpus=gpus, limits=None, workload=workload))


def _cards() -> Iterator[catalogue.Card]:
    """Yield a card from Ampere on for each size, the smallest first."""
    by_size: dict[int, catalogue.Card] = {}
    cards = (card for card in catalogue.cards() if card.speeds["has_bfloat16"])
    for card in sorted(cards, key=lambda card: card.usable_bytes):
        by_size.setdefault(round(card.memory_gib), card)
    yield from (card for _, card in sorted(by_size.items()))


def _entry(device: Device) -> str:
    """Write a device as an entry of a fleet: its card, or its budget if that is smaller."""
    if device.product and catalogue.is_card(device.product):
        (card,) = Fleet.parse(device.product).devices
        if card.budget_bytes == device.budget_bytes:
            return device.product
    return exact_bytes(device.budget_bytes)


def _size_of(device: Device) -> str:
    if device.memory_bytes is not None:
        return f"{round(device.memory_bytes / GIB)} GB"
    return format_bytes(device.budget_bytes)

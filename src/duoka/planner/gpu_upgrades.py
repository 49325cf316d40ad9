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


Candidate = tuple[str, str, int]
"""The words of an upgrade ("" where another says the same), its fleet, and its new bytes."""


def upgrades(problem: PlanProblem, plan_for: PlanFor) -> list[Upgrade]:
    """Find the smallest sufficient card beside the others, or in the place of the smallest.

    Where no single card as large as the largest present would do, also more of the same kind.
    Returned in the order of new memory.
    """
    devices = [device for device in problem.fleet.devices if device.name != "cpu"]
    if not devices:
        return []  # cards that fit such a machine are unknown
    fitting = []
    for candidates in (_one_more, _replaced, _more_alike):
        for text, gpus, new_bytes in candidates(problem.gpus, devices):
            if plan := _plan_on(gpus, problem, plan_for):
                if text:
                    fitting.append(Upgrade(text=text, gpus=gpus, plan=plan, new_bytes=new_bytes))
                break
    return sorted(fitting, key=lambda upgrade: upgrade.new_bytes)


def _max_new(devices: Sequence[Device]) -> int:
    return min(_MOST_GPUS, MAX_DEVICES) - len(devices)


def _one_more(gpus: str, devices: Sequence[Device]) -> Iterator[Candidate]:
    """Yield each card beside the others, the smallest first."""
    for card in _cards() if _max_new(devices) > 0 else ():
        size = round(card.memory_gib) * GIB
        yield f"one more card with {_describe(card)}", with_more(gpus, devices, card.name), size


def _replaced(gpus: str, devices: Sequence[Device]) -> Iterator[Candidate]:
    """Yield each larger card in the place of the smallest device, the smallest first.

    No other exchange succeeds with a smaller card: of two fleets that differ by one device, the one
    with the larger device holds whatever the other holds.
    """
    index = min(range(len(devices)), key=lambda number: devices[number].budget_bytes)
    smallest = devices[index]
    place = f"instead of {smallest.name} ({_size_of(smallest)})"
    for card in _cards():
        if Fleet.parse(card.name).budget_bytes > smallest.budget_bytes:
            changed = with_replaced(gpus, devices, index, card.name)
            yield f"a card with {_describe(card)}, {place}", changed, round(card.memory_gib) * GIB


def _more_alike(gpus: str, devices: Sequence[Device]) -> Iterator[Candidate]:
    """Yield ascending numbers of further GPUs like the largest."""
    largest = max(devices, key=lambda device: device.budget_bytes)
    for count in range(1, _max_new(devices) + 1):
        # A single one is a card of this size, or a smaller one, by `_one_more`.
        text = f"{count} more GPUs like {largest.name} ({_size_of(largest)})" if count > 1 else ""
        more = with_more(gpus, devices, _entry(largest), count)
        yield text, more, count * largest.budget_bytes


def _describe(card: catalogue.Card) -> str:
    return f"{round(card.memory_gib)} GB (such as {card.name})"


def _plan_on(gpus: str, problem: PlanProblem, plan_for: PlanFor) -> Plan | None:
    """Plan for another fleet, read as by the command line."""
    try:
        fleet = usable(Fleet.parse(gpus), problem.constraints)
    except DuokaError:
        return None
    workload = replace(problem.workload, gpu_generation=fleet.gpu_generation)
    return plan_for(replace(problem, fleet=fleet, gpus=gpus, workload=workload))


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

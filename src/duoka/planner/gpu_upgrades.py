"""GPU upgrades: the GPU to add to a fleet, or to replace another with, so that a workload fits.

Memory sizes are those of real cards. Each size is represented by its card with the least usable
memory, so that any other card of the size fits as well. Prices are unknown: a card with less memory
is assumed to be cheaper.
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

from .limits import fleet_for, usable
from .plan import Plan
from .request import PlanProblem

_MOST_GPUS = 16

PlanFor = Callable[[PlanProblem], Plan | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """A fleet on which the problem has a plan; `gpus` is in the form of `Fleet.parse`.

    `text` describes the change, `new_bytes` is the memory of the additional cards.
    """

    text: str
    gpus: str
    plan: Plan
    new_bytes: int


Candidate = tuple[str, str, int]
"""Text of an upgrade ("" if another candidate covers it), fleet as text, and bytes of new cards."""


def upgrades(problem: PlanProblem, plan_for: PlanFor) -> list[Upgrade]:
    """Find up to three upgrades with a plan, in the order of new memory.

    They are the smallest card to add, the smallest card to replace the smallest GPU with, and, if
    one more GPU like the largest isn't enough, the number of such GPUs to add.
    """
    devices = [device for device in problem.fleet.devices if device.name != "cpu"]
    if not devices:
        return []  # a machine without a GPU: unknown which cards it can hold
    fitting = []
    for candidates in (_one_more, _one_larger, _more_like_largest):
        for text, gpus, new_bytes in candidates(problem.gpus, devices):
            if plan := _plan_on(gpus, problem, plan_for):
                if text:
                    fitting.append(Upgrade(text=text, gpus=gpus, plan=plan, new_bytes=new_bytes))
                break
    return sorted(fitting, key=lambda upgrade: upgrade.new_bytes)


def _max_new(devices: Sequence[Device]) -> int:
    """Return the number of GPUs that may be added."""
    return min(_MOST_GPUS, MAX_DEVICES) - len(devices)


def _one_more(gpus: str, devices: Sequence[Device]) -> Iterator[Candidate]:
    """Yield the fleet with one more card, for each card from the smallest on."""
    for card in _cards() if _max_new(devices) > 0 else ():
        size = round(card.memory_gib) * GIB
        yield f"one more card with {_describe(card)}", with_more(gpus, devices, card.name), size


def _one_larger(gpus: str, devices: Sequence[Device]) -> Iterator[Candidate]:
    """Yield the fleet with a larger card instead of the smallest GPU, the smallest card first.

    Replacing another GPU never needs a smaller card: the resulting fleets differ in one device, and
    the fleet that keeps the larger GPU holds whatever the other fleet holds.
    """
    index = min(range(len(devices)), key=lambda number: devices[number].budget_bytes)
    smallest = devices[index]
    place = f"instead of {smallest.name} ({_size_of(smallest)})"
    for card in _cards():
        if Fleet.parse(card.name).budget_bytes > smallest.budget_bytes:
            changed = with_replaced(gpus, devices, index, card.name)
            yield f"a card with {_describe(card)}, {place}", changed, round(card.memory_gib) * GIB


def _more_like_largest(gpus: str, devices: Sequence[Device]) -> Iterator[Candidate]:
    """Yield the fleet with ascending numbers of additional GPUs like its largest one."""
    largest = max(devices, key=lambda device: device.budget_bytes)
    for count in range(1, _max_new(devices) + 1):
        # A single additional GPU is covered by `_one_more`, with a card of this size or a smaller.
        text = f"{count} more GPUs like {largest.name} ({_size_of(largest)})" if count > 1 else ""
        more = with_more(gpus, devices, _format_entry(largest), count)
        yield text, more, count * largest.budget_bytes


def _describe(card: catalogue.Card) -> str:
    return f"{round(card.memory_gib)} GB (such as {card.name})"


def _plan_on(gpus: str, problem: PlanProblem, plan_for: PlanFor) -> Plan | None:
    """Plan the problem on another fleet, parsed as by the command line; None if nothing fits."""
    try:
        offload = problem.constraints.offload
        fleet = fleet_for(Fleet.parse(gpus), None, offload=offload, host=problem.host)
        fleet = usable(fleet, problem.constraints)
    except DuokaError:
        return None
    workload = replace(problem.workload, gpu_generation=fleet.gpu_generation)
    return plan_for(replace(problem, fleet=fleet, gpus=gpus, workload=workload))


def _cards() -> Iterator[catalogue.Card]:
    """Yield one card for each memory size, the smallest first; only cards from Ampere on."""
    by_size: dict[int, catalogue.Card] = {}
    cards = (card for card in catalogue.cards() if card.speeds["has_bfloat16"])
    for card in sorted(cards, key=lambda card: card.usable_bytes):
        by_size.setdefault(round(card.memory_gib), card)
    yield from (card for _, card in sorted(by_size.items()))


def _format_entry(device: Device) -> str:
    """Return a fleet entry for a device: its card if the budget is the card's, else its budget."""
    if device.product and catalogue.is_card(device.product):
        (card,) = Fleet.parse(device.product).devices
        if card.budget_bytes == device.budget_bytes:
            return device.product
    return exact_bytes(device.budget_bytes)


def _size_of(device: Device) -> str:
    if device.memory_bytes is not None:
        return f"{round(device.memory_bytes / GIB)} GB"
    return format_bytes(device.budget_bytes)

"""GPU upgrades: the GPU to add, or to put in the place of one, so that something fits.

Sizes are those of real cards; for each size the card is taken that offers the least of it, so that
any other one will do as well. It knows no prices: what takes less memory is taken to be cheaper.
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

Write = Callable[[str], str]
"""From a card's name to the text of a fleet with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgrade:
    """A fleet on which something fits, in the words of `Fleet.parse`, and its plan there."""

    text: str
    gpus: str
    plan: Plan
    new_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    """A size of cards, and the card that offers the least of it."""

    gib: int
    name: str
    budget_bytes: int


def upgrades(
    problem: PlanProblem,
    conceivable: Callable[[PlanProblem], bool],
    attempt: Callable[[PlanProblem], Plan | None],
) -> list[Upgrade]:
    """Find the smallest card that helps beside the others, and in the place of the smallest one.

    Where no single card as large as the largest there would do, also more of the same kind.
    """
    devices = [device for device in problem.fleet.devices if device.name != "cpu"]
    if not devices:
        return []  # nobody says what card that machine could take
    search = _Upgrades(problem, devices, conceivable, attempt)
    candidates = [search.one_more(), search.replaced(), search.more_alike()]
    return sorted(
        (upgrade for upgrade in candidates if upgrade is not None),
        key=lambda upgrade: upgrade.new_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Upgrades:
    problem: PlanProblem
    devices: Sequence[Device]
    conceivable: Callable[[PlanProblem], bool]
    attempt: Callable[[PlanProblem], Plan | None]

    @property
    def most(self) -> int:
        """How many GPUs may come to the others."""
        return min(_MOST_GPUS, MAX_DEVICES) - len(self.devices)

    def one_more(self) -> Upgrade | None:
        """The smallest card beside the others."""
        if self.most < 1:
            return None
        gpus = self.problem.gpus
        upgrade = self._smallest([*_sizes()], lambda name: with_more(gpus, self.devices, name))
        return upgrade and replace(upgrade, text=f"one more card with {upgrade.text}")

    def replaced(self) -> Upgrade | None:
        """The smallest card in the place of the smallest that is there.

        No other exchange does with a smaller one: of two fleets that differ by one device, the
        one with the larger device holds whatever the other holds.
        """
        index = min(range(len(self.devices)), key=lambda n: self.devices[n].budget_bytes)
        old = self.devices[index]
        larger = [size for size in _sizes() if size.budget_bytes > old.budget_bytes]
        gpus = self.problem.gpus
        upgrade = self._smallest(
            larger, lambda name: with_replaced(gpus, self.devices, index, name)
        )
        return upgrade and replace(
            upgrade,
            text=f"a card with {upgrade.text}, in the place of {old.name} ({_size_of(old)})",
        )

    def more_alike(self) -> Upgrade | None:
        """More GPUs like the largest that is there, two at least."""
        best = max(self.devices, key=lambda device: device.budget_bytes)
        for count in range(1, self.most + 1):
            gpus = with_more(self.problem.gpus, self.devices, _entry(best), count)
            plan = self._plan_on(gpus)
            if plan is None:
                continue
            text = f"{count} more GPUs like {best.name} ({_size_of(best)})"
            bought = count * best.budget_bytes
            # One more is told of as a card of its size, or a smaller one.
            return (
                None if count == 1 else Upgrade(text=text, gpus=gpus, plan=plan, new_bytes=bought)
            )
        return None

    def _smallest(self, sizes: Sequence[_Size], write: Write) -> Upgrade | None:
        """The smallest size that will do; a larger one does whatever a smaller one does."""
        for size in sizes:
            gpus = write(size.name)
            plan = self._plan_on(gpus)
            if plan is not None:
                text = f"{size.gib} GB (such as {size.name})"
                return Upgrade(text=text, gpus=gpus, plan=plan, new_bytes=size.gib * GIB)
        return None

    def _plan_on(self, gpus: str) -> Plan | None:
        problem = self._problem_on(gpus)
        if problem is None or not self.conceivable(problem):
            return None
        return self.attempt(problem)

    def _problem_on(self, gpus: str) -> PlanProblem | None:
        """The problem on another fleet, read as the command line would read it."""
        try:
            fleet = usable(Fleet.parse(gpus), self.problem.constraints)
        except DuokaError:
            return None
        workload = replace(self.problem.workload, gpu_generation=fleet.gpu_generation)
        return replace(self.problem, fleet=fleet, gpus=gpus, limits=None, workload=workload)


def _sizes() -> Iterator[_Size]:
    """The sizes of the catalogue's cards from Ampere on, the smallest first."""
    smallest: dict[int, catalogue.Card] = {}
    cards = (card for card in catalogue.cards() if card.speeds["has_bfloat16"])
    for card in sorted(cards, key=lambda card: card.usable_bytes):
        smallest.setdefault(round(card.memory_gib), card)
    for gib, card in sorted(smallest.items()):
        (device,) = Fleet.parse(card.name).devices
        yield _Size(gib=gib, name=card.name, budget_bytes=device.budget_bytes)


def _entry(device: Device) -> str:
    """A device as an entry of a fleet: its card where it has all of that, else its budget."""
    if device.product and catalogue.is_card(device.product):
        (card,) = Fleet.parse(device.product).devices
        if card.budget_bytes == device.budget_bytes:
            return device.product
    return exact_bytes(device.budget_bytes)


def _size_of(device: Device) -> str:
    if device.memory_bytes is not None:
        return f"{round(device.memory_bytes / GIB)} GB"
    return format_bytes(device.budget_bytes)

"""How long a context, and how large a batch, each model and machine supports, for `planner.py`.

Contexts are of one sequence, in multiples of `GRID`, up to the longest of the benchmark or what the
model was made for; batches are of `BATCH_CONTEXT` tokens, or of as many as the model was made for,
up to `MOST_BATCH` sequences. For the best split, the referee looks for a placement of more than
duoka plans for: one step more, and at `PROBES` numbers from there up to what weights and the full
cache allow, since a larger one might fit where a smaller one fragments. Where none holds, duoka's
is the best. duoka's own is what `--max-context` and `--max-batch` find.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from planner_auto import holds
from planner_cells import Row, Subject, workload_of
from planner_models import CONTEXTS, MACHINES
from planner_referee import Bench, Referee, chunked

from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.planner.max_workload import find_largest
from duoka.planner.request import PlanProblem

GRID = 256
BATCH_CONTEXT = 8192
MOST_BATCH = 128
PROBES = 2


@dataclass(frozen=True)
class Sweep:
    """What is made as large as can be, for one model."""

    subject: Subject
    what: Literal["context", "batch"]

    @property
    def limit(self) -> int:
        longest = min(self.subject.longest, CONTEXTS[-1])
        return longest // GRID if self.what == "context" else MOST_BATCH

    @property
    def unit(self) -> int:
        return GRID if self.what == "context" else 1

    def workload(self, number: int) -> Workload:
        if self.what == "context":
            return workload_of(number * GRID, 1)
        return workload_of(min(self.subject.longest, BATCH_CONTEXT), number)

    def conceivable(self, budgets: Sequence[int]) -> int:
        """The most that weights and the full cache allow."""

        def fits(number: int) -> bool:
            whole = replace(self.workload(number), prefill_chunk_tokens=None)
            return Referee(self.subject.profile, whole).may_fit(budgets)

        return most(fits, 1, self.limit)

    def planned(self, fleet: Fleet) -> int:
        """The most that duoka finds."""
        problem = PlanProblem(fleet=fleet, workload=self.workload(1), largest=self.what)
        longest = self.limit * GRID if self.what == "context" else self.subject.longest
        found = find_largest(replace(self.subject.profile, max_context_tokens=longest), problem)
        if not found:
            return 0
        if self.what == "context":
            return found.workload.context_tokens // GRID
        return min(found.workload.batch, self.limit)

    def best_split(self, budgets: Sequence[int], own: int) -> int:
        """The most that a placement holds, every step replayed, from duoka's own on."""

        def fits(number: int) -> bool:
            return Bench(self.subject.profile, self.workload(number)).any(budgets)

        allowed = self.conceivable(budgets)
        probes = {own + 1 + step * (allowed - own - 1) // PROBES for step in range(PROBES)}
        beaten = [number for number in sorted(probes) if own < number <= allowed and fits(number)]
        return most(fits, beaten[-1], allowed) if beaten else own

    def mapped(self, machine: str, fleet: Fleet, best: int) -> int:
        """The most that the map of "auto" holds, in the chunk that suits it best."""
        device_of = self.subject.auto(machine).device_of
        if device_of is None:
            return 0

        def fits(number: int) -> bool:
            return any(
                holds(self.subject.profile, device_of, fleet, each)
                for each in chunked(self.workload(number))
            )

        return most(fits, 1, best)


def contexts(subject: Subject, machines: Sequence[str]) -> Iterator[Row]:
    sweeps = Sweep(subject, "context"), Sweep(subject, "batch")
    for machine, sweep in ((machine, sweep) for machine in machines for sweep in sweeps):
        fleet = Fleet.parse(MACHINES[machine])
        budgets = [device.budget_bytes for device in fleet.devices]
        own = sweep.planned(fleet)
        best = sweep.best_split(budgets, own)
        yield {
            "what": sweep.what,
            "model": subject.name,
            "machine": machine,
            "limit": sweep.limit * sweep.unit,
            "best": best * sweep.unit,
            "duoka": own * sweep.unit,
            "auto": sweep.mapped(machine, fleet, best) * sweep.unit,
        }


def most(fits: Callable[[int], bool], low: int, high: int) -> int:
    """The largest number from `low` to `high` that fits, where smaller ones do; `low` - 1 if none.

    The upper end is tried first: it is a bound that is often attained.
    """
    if low > high or fits(high):
        return max(high, low - 1)
    low -= 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

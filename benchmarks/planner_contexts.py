"""How long a context each model and machine supports, for `planner.py`: one sequence.

Lengths are multiples of `GRID`, up to the longest of the benchmark or what the model was made for.
For the best split, the referee looks for a placement of more than duoka plans for: one step more,
and at `PROBES` lengths from there up to what weights and the full cache allow, since a longer one
might fit where a shorter one fragments. Where none holds, duoka's is the best. duoka's own is what
`--max-context` finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from planner_auto import holds
from planner_cells import Row, Subject, workload_of
from planner_models import CONTEXTS, MACHINES
from planner_referee import Bench, Referee, chunked

from duoka.answering.largest import find_largest
from duoka.fleet import Fleet
from duoka.planner import Question
from duoka.profile import Profile

GRID = 256
PROBES = 2


def contexts(subject: Subject, machines: Sequence[str]) -> Iterator[Row]:
    limit = min(subject.longest, CONTEXTS[-1]) // GRID
    for machine in machines:
        fleet = Fleet.parse(MACHINES[machine])
        budgets = [device.budget_bytes for device in fleet.devices]
        allowed = conceivable(subject.profile, budgets, limit)
        own = planned(subject.profile, fleet, limit)
        best = best_split(subject.profile, budgets, own, allowed)
        yield {
            "model": subject.name,
            "machine": machine,
            "limit": limit * GRID,
            "best": best * GRID,
            "duoka": own * GRID,
            "auto": mapped(subject, machine, fleet, best) * GRID,
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


def conceivable(profile: Profile, budgets: Sequence[int], limit: int) -> int:
    """The most that weights and the full cache allow."""

    def fits(number: int) -> bool:
        whole = replace(workload_of(number * GRID, 1), prefill_chunk_tokens=None)
        return Referee(profile, whole).may_fit(budgets)

    return most(fits, 1, limit)


def planned(profile: Profile, fleet: Fleet, limit: int) -> int:
    """The most that duoka finds."""
    question = Question(fleet=fleet, workload=workload_of(GRID, 1), largest="context")
    profile = replace(profile, max_context_tokens=limit * GRID)
    found = find_largest(profile, question)
    return 0 if found is None else found.workload.context_tokens // GRID


def best_split(profile: Profile, budgets: Sequence[int], own: int, allowed: int) -> int:
    """The most that a placement holds, every step replayed, from duoka's own on."""

    def fits(number: int) -> bool:
        return Bench(profile, workload_of(number * GRID, 1)).any(budgets)

    probes = {own + 1 + step * (allowed - own - 1) // PROBES for step in range(PROBES)}
    beaten = [number for number in sorted(probes) if own < number <= allowed and fits(number)]
    return most(fits, beaten[-1], allowed) if beaten else own


def mapped(subject: Subject, machine: str, fleet: Fleet, best: int) -> int:
    """The most that the map of "auto" holds, in the chunk that suits it best."""
    device_of = subject.auto(machine).device_of
    if device_of is None:
        return 0

    def fits(number: int) -> bool:
        return any(
            holds(subject.profile, device_of, fleet, each)
            for each in chunked(workload_of(number * GRID, 1))
        )

    return most(fits, 1, best)

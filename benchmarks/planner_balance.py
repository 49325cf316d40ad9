"""The free memory on the fullest GPU of a machine, by duoka and by "auto", for `planner.py`.

Both place one sequence of `CONTEXT` tokens, or of as many as the model was made for, on all GPUs
of a machine. The prompt runs in the chunks of duoka's plan in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner_cells import Row, Subject, workload_of
from planner_models import MACHINES

from duoka.errors import InfeasibleError
from duoka.forecast.profile import Profile
from duoka.forecast.replay import Replay
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan

CONTEXT = 8192
BALANCED_MACHINES = (
    "2 x 24",
    "4 x 24",
    "24 + 12",
    "12 + 24",
    "8 + 12 + 24",
    "2 x 24, the first busy",
    "4 x 24, the third busy",
    "8 unequal",
    "8 unequal, small first",
)


def balance(subject: Subject) -> Iterator[Row]:
    """Yield a row for each machine that holds the model by duoka's plan."""
    asked = workload_of(min(subject.longest, CONTEXT), 1)
    for machine in BALANCED_MACHINES:
        fleet = Fleet.parse(MACHINES[machine])
        problem = PlanProblem(fleet=fleet, workload=asked, use_all=True)
        try:
            plan = find_plan(subject.profile, problem)
        except InfeasibleError:
            continue
        made = subject.auto(machine)
        free = None
        if made.device_of is not None:
            free = least_free(subject.profile, made.device_of, fleet, plan.workload)
        yield {
            "model": subject.name,
            "machine": machine,
            "duoka": min(each.budget_bytes - each.reserved_bytes for each in plan.forecast.devices),
            "auto": free,
        }


def least_free(
    profile: Profile, device_of: Sequence[str], fleet: Fleet, workload: Workload
) -> int | None:
    """Return the free bytes on the fullest GPU; None if a GPU doesn't hold its part."""
    replay, free = Replay(profile, workload), []
    for name in set(device_of):
        blocks = [index for index, at in enumerate(device_of) if at == name]
        budget = fleet.device(name).budget_bytes
        peaks = replay.run(blocks, budget, device_of=device_of)
        if peaks is None:
            return None
        free.append(budget - peaks.reserved_bytes)
    return min(free)

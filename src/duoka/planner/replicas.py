"""Replicas: several copies of a model on one fleet, each on GPUs of its own.

Where a part of the fleet holds the workload, the rest can hold it again. A *group* is a set of
devices that hold one copy together, each of them in use. Wanted are, in this order: as many groups
as can be, or as many as were asked for; as few devices in all, or all of them; the best groups for
the objective; the user's order. The optimum over all ways to deal the devices is found by a
dynamic programme over what is left of each kind of device; those that can be exchanged are counted.

What is optimised is the headroom of the tightest group, the latency of the slowest, or the
throughput or the pages of all together. It knows nothing of how copies share their work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from duoka.base.progress import say
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.profile import Profile
from duoka.hardware.fleet import Fleet

from .constraints import Constraints
from .device_map import find_device
from .plan import Plan
from .planner import attempt, objective_of, without_cpu
from .request import PlanProblem, PlanRequest
from .resolve import Find, answer, workload_for
from .search import Objective, exchangeable
from .suggestions import ProfileFor

Counts = tuple[int, ...]
"""How many devices of each kind."""

# Groups that can be made of what is left, for all that can be left: more take minutes.
_MOST_DEALS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """One plan for each copy of the model, for a fleet of its group's devices alone.

    They are in the order of the first of them; the devices that no group uses are `idle`. `value`
    is bytes of headroom on the tightest device of all; seconds of the slowest group; or requests
    a second or pages of all groups.
    """

    plans: tuple[Plan, ...]
    idle: tuple[str, ...]
    objective: Objective
    value: float


@dataclass(frozen=True, slots=True, order=True)
class _Deal:
    """A way to deal some devices; the larger the better."""

    devices: int  # negative, so that fewer are better
    value: float
    groups: tuple[Counts, ...]


def plan_replicas(
    profile: Profile,
    problem: PlanProblem,
    number: int | Literal["auto"] = "auto",
    *,
    source: str = "",
    profile_for: ProfileFor | None = None,
    request: PlanRequest | None = None,
    suggest: bool = True,
) -> Replicas:
    """Find the most copies that the fleet holds, or so many; with `use_all` none stays idle."""
    _refuse_senseless(problem, number)
    request = request or problem.request
    problem = replace(problem, fleet=without_cpu(problem.fleet))
    dealer = _Dealer(profile, problem, source)
    best = dealer.best()
    if not best:
        alone = replace(problem, use_all=False)
        try:
            answer(profile, alone, profile_for=profile_for, request=request, suggest=suggest)
        except InfeasibleError as error:
            ways = (replace(way, without=(*way.without, "--replicas")) for way in error.ways_out)
            raise error.with_ways_out(ways) from None
    wanted = max(best, default=0) if number == "auto" else number
    if wanted not in best:
        raise _too_many(profile, problem, wanted, max(best, default=0))
    copies = dealer.answer(best[wanted])
    return replace(
        copies,
        plans=tuple(_asking(plan, request, problem, copies.objective) for plan in copies.plans),
    )


def _too_many(profile: Profile, problem: PlanProblem, wanted: int, most: int) -> InfeasibleError:
    everywhere = " with every one of them in use" if problem.use_all else ""
    if not most:
        return InfeasibleError(
            f"{profile.model} fits these GPUs, but no copies do{everywhere}",
            hint="leave out --use-all",
        )
    return InfeasibleError(
        f"{format_copies(wanted)} of {profile.model} don't fit these GPUs{everywhere}; "
        f"{format_copies(most)} {'does' if most == 1 else 'do'}",
        hint=f"--replicas {most}, or more GPUs",
    )


def format_copies(number: int) -> str:
    """A number of copies, for people."""
    return "1 copy" if number == 1 else f"{number} copies"


def _asking(plan: Plan, request: PlanRequest, problem: PlanProblem, objective: Objective) -> Plan:
    """A copy's plan, keeping what asks for it alone: its own GPUs, where they have names."""
    names, fleet = plan.fleet.names, problem.fleet
    uuids = [device.uuid for device in plan.fleet.devices]
    gpus = ",".join(filter(None, uuids)) if all(uuids) else ""
    alone = objective_of(replace(problem, fleet=plan.fleet))
    again = replace(
        request,
        gpus=request.gpus if len(names) == len(fleet.names) else gpus,
        objective=request.objective if alone == objective else objective,
        constraints=_of_group(request.constraints, fleet, names),
    )
    return replace(plan, request=again)


def _of_group(constraints: Constraints, fleet: Fleet, names: Collection[str]) -> Constraints:
    """What is demanded of a group: what other devices leave free is no matter of it."""
    reserve = [entry for entry in constraints.reserve if find_device(entry[0], fleet) in names]
    return replace(constraints, reserve=tuple(reserve))


def _refuse_senseless(problem: PlanProblem, number: int | Literal["auto"]) -> None:
    constraints = problem.constraints
    if number != "auto" and not 1 <= number <= len(problem.fleet.devices):
        raise UsageError(
            f"{number} copies of a model on {len(problem.fleet.devices)} devices",
            hint="each copy needs a device of its own",
        )
    for is_said, what in (
        (problem.device_map is not None, "a device map"),
        (bool(constraints.pins), "a pin"),
        (constraints.strategy != "auto", f"the strategy {constraints.strategy}"),
        (constraints.offload, "offloading"),
        (problem.largest is not None, f"the largest {problem.largest}"),
    ):
        if is_said:
            raise UsageError(
                f"{what} is for one copy of a model, and several are to be planned",
                hint="leave out one of the two",
            )


class _Dealer:
    """The kinds of devices, what groups of them can do, and how they are dealt."""

    def __init__(self, profile: Profile, problem: PlanProblem, source: str) -> None:
        self._profile = profile
        self._source = source
        self._problem = problem
        self._objective = objective_of(problem)
        self._kinds = exchangeable(problem.fleet)
        self._plans: dict[Counts, Plan | None] = {}
        self._holding: list[Counts] = []
        all_of_them = tuple(len(kind) for kind in self._kinds)
        deals = math.prod((count + 1) * (count + 2) // 2 for count in all_of_them)
        if deals > _MOST_DEALS:
            raise UsageError(
                f"{len(problem.fleet.devices)} devices of {len(self._kinds)} kinds can be dealt "
                "in too many ways",
                hint="name fewer devices, or give similar ones equal budgets",
            )
        self._all = all_of_them

    def best(self) -> dict[int, _Deal]:
        """The best way to deal all devices, by the number of groups."""
        groups = [counts for counts in self._by_size() if self._plan(counts) is not None]
        deals: dict[Counts, dict[int, _Deal]] = {}
        for left in itertools.product(*(range(count + 1) for count in self._all)):
            deals[left] = self._deal(left, groups, deals)
        return {number: deal for number, deal in deals[self._all].items() if number}

    def answer(self, deal: _Deal) -> Replicas:
        """The plans of a deal, on the devices that the user named first."""
        free = [list(kind) for kind in self._kinds]
        dealt: list[tuple[int, ...]] = []
        for counts in deal.groups:
            taken: list[int] = []
            for kind, count in zip(free, counts, strict=True):
                taken += kind[:count]
                del kind[:count]
            dealt.append(tuple(sorted(taken)))
        plans = [self._plan_on(devices) for devices in sorted(dealt)]
        assert all(plan is not None for plan in plans), "its kind of group has a plan"
        names = self._problem.fleet.names
        return Replicas(
            plans=tuple(replace(plan, source=self._source) for plan in plans if plan is not None),
            idle=tuple(names[index] for index in sorted(itertools.chain(*free))),
            objective=self._objective,
            value=abs(deal.value),
        )

    def _deal(
        self, left: Counts, groups: Sequence[Counts], deals: dict[Counts, dict[int, _Deal]]
    ) -> dict[int, _Deal]:
        """The best ways to deal what is left: the first device stays idle, or is in a group."""
        if not any(left):
            return {0: _Deal(0, self._join(()), ())}
        first = next(kind for kind, count in enumerate(left) if count)
        best: dict[int, _Deal] = {}
        if not self._problem.use_all:
            idle = (*left[:first], left[first] - 1, *left[first + 1 :])
            best = dict(deals[idle])
        for counts in groups:
            rest = tuple(have - take for have, take in zip(left, counts, strict=True))
            if not counts[first] or min(rest) < 0:
                continue
            plan = self._plan(counts)
            assert plan is not None, "only groups that hold a copy are dealt"
            for number, deal in deals[rest].items():
                longer = _Deal(
                    deal.devices - sum(counts),
                    self._join((deal.value, self._worth(plan))),
                    (counts, *deal.groups),
                )
                if number + 1 not in best or _is_better(longer, best[number + 1]):
                    best[number + 1] = longer
        return best

    def _by_size(self) -> Iterator[Counts]:
        """All groups that could be, the smallest first, but for those that are never needed."""
        every = itertools.product(*(range(count + 1) for count in self._all))
        for counts in sorted(
            (counts for counts in every if any(counts)), key=lambda counts: sum(counts)
        ):
            if self._problem.use_all or not self._is_larger(counts):
                yield counts

    def _is_larger(self, counts: Counts) -> bool:
        """Whether a part of these devices is known to hold a copy: then all are never needed."""
        return any(
            other != counts and all(map(int.__le__, other, counts)) for other in self._holding
        )

    def _plan(self, counts: Counts) -> Plan | None:
        if counts not in self._plans:
            kinds = zip(self._kinds, counts, strict=True)
            chosen = itertools.chain.from_iterable(kind[:count] for kind, count in kinds)
            self._plans[counts] = self._plan_on(tuple(sorted(chosen)))
            if self._plans[counts] is not None:
                self._holding.append(counts)
        return self._plans[counts]

    def _plan_on(self, devices: Sequence[int]) -> Plan | None:
        """The plan that uses each of these devices."""
        fleet = self._problem.fleet
        names = [fleet.names[index] for index in devices]
        group = replace(
            self._problem,
            fleet=fleet.only(names),
            objective=self._objective,
            use_all=True,
            gpus="",
            constraints=_of_group(self._problem.constraints, fleet, names),
        )
        try:
            return attempt(self._profile, group)
        except UsageError:
            return None  # more devices than stages

    def _worth(self, plan: Plan) -> float:
        """What a group adds, to be made large."""
        if self._objective in ("headroom", "pages"):
            return plan.value
        return -plan.value if self._objective == "latency" else 1.0 / plan.value

    @property
    def _join(self) -> Callable[[Sequence[float]], float]:
        """What groups are worth together: as much as the worst, or all of it."""
        if self._objective in ("throughput", "pages"):
            return math.fsum
        return lambda values: min(values, default=math.inf)


def _is_better(one: _Deal, other: _Deal) -> bool:
    return (one.devices, one.value) > (other.devices, other.value)


def replicas_for(
    checkpoint: Checkpoint,
    problem: PlanProblem,
    number: int | Literal["auto"],
    find: Find,
    *,
    suggest: bool = True,
) -> Replicas:
    """The copies of a checkpoint."""
    say("planning")
    workload = workload_for(checkpoint, problem.workload)
    if workload.quantize == "auto":
        raise UsageError(
            "several copies are planned for one quantization of the weights",
            hint="give quantize none, int8, int4 or nf4",
        )
    return plan_replicas(
        find(workload),
        replace(problem, workload=workload),
        number,
        source=checkpoint.source,
        profile_for=lambda other: find(workload_for(checkpoint, other)),
        request=replace(problem.request, trust_remote_code=checkpoint.trust_remote_code),
        suggest=suggest,
    )

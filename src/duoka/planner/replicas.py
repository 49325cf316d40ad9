"""Replicas: data-parallel replicas of a model on one fleet, each on GPUs of its own.

A *group* is a set of devices that hold one replica together, all of them in use. An *assignment*
forms disjoint groups. The best assignment has, in this order: the requested or the largest number
of groups; the fewest devices in all (with `use_all`, all of them); the best value for the
objective; the first devices in the user's order.

A dynamic programme finds the optimum. Its state is the number of free devices of each kind, where
a kind is a set of exchangeable devices: with two kinds of two and three devices the states are
(0..2, 0..3). In the best assignment of a state, the first free device either stays idle or belongs
to one of the groups; the rest is the best assignment of a smaller state.

The objective is the headroom of the tightest group, the latency of the slowest group, or the total
throughput or pages of all groups. `serve` distributes requests among the replicas.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from duoka.base.progress import say
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.costs import Costs
from duoka.forecast.profile import Profile
from duoka.hardware.fleet import Fleet

from .constraints import Constraints
from .device_map import find_device
from .plan import Plan
from .planner import place_best, with_chunks, without_cpu
from .request import PlanProblem, PlanRequest
from .resolve import Find, answer, workload_for
from .search import Objective, exchangeable, resolve_objective
from .suggestions import ProfileFor

Counts = tuple[int, ...]
"""The number of devices of each kind."""

# Limit of the pairs of a state and a group within it; more take minutes.
_MAX_PAIRS = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """The plans of all replicas, each for the devices of its group alone.

    The plans are in the order of their first devices. `idle` are the devices in no group. `value`
    depends on the objective: the least headroom of a device in bytes ("headroom"), the seconds of
    the slowest group ("latency"), or the requests per second or pages of all groups together.
    """

    plans: tuple[Plan, ...]
    idle: tuple[str, ...]
    objective: Objective
    value: float


class _Deal(NamedTuple):
    """Groups with disjoint devices; an assignment with larger (devices, value) is better."""

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
    """Plan the given or the largest number of replicas; with `use_all` no device stays idle.

    `request` is stored in the plans, by default the problem's. With `suggest`, the error for a
    model that doesn't fit even once has suggestions, for which `profile_for` traces profiles.
    """
    _refuse_senseless(problem, number)
    request = request or problem.request
    problem = replace(problem, fleet=without_cpu(problem.fleet))
    group_search = _GroupSearch(profile, problem)
    deals = group_search.deal()
    if not deals:
        single = replace(problem, use_all=False)
        try:
            answer(profile, single, profile_for=profile_for, request=request, suggest=suggest)
        except InfeasibleError as error:
            ways = (replace(way, without=(*way.without, "--replicas")) for way in error.ways_out)
            raise error.with_ways_out(ways) from None
    num_copies = max(deals, default=0) if number == "auto" else number
    if num_copies not in deals:
        raise _too_many_replicas(profile, problem, num_copies, max(deals, default=0))
    copies = group_search.plans_of(deals[num_copies])
    plans = (group_search.restrict(plan, request) for plan in copies.plans)
    return replace(copies, plans=tuple(replace(plan, source=source) for plan in plans))


def _too_many_replicas(
    profile: Profile, problem: PlanProblem, num_copies: int, largest: int
) -> InfeasibleError:
    """Return the error for `num_copies` replicas, `largest` being the largest possible number."""
    everywhere = " when all are used" if problem.use_all else ""
    if not largest:
        return InfeasibleError(
            f"{profile.model} fits these GPUs, but several replicas don't{everywhere}",
            hint="omit --use-all",
        )
    return InfeasibleError(
        f"{format_copies(num_copies)} of {profile.model} don't fit these GPUs{everywhere}; "
        f"{format_copies(largest)} {'does' if largest == 1 else 'do'}",
        hint=f"--replicas {largest}, or more GPUs",
    )


def format_copies(number: int) -> str:
    """Format a number of replicas: "2 copies"."""
    return "1 copy" if number == 1 else f"{number} copies"


def _restrict(constraints: Constraints, fleet: Fleet, names: Collection[str]) -> Constraints:
    """Keep only the reserves of the devices in `names`, those of a group."""
    reserve = [entry for entry in constraints.reserve if find_device(entry[0], fleet) in names]
    return replace(constraints, reserve=tuple(reserve))


def _refuse_senseless(problem: PlanProblem, number: int | Literal["auto"]) -> None:
    """Refuse an impossible number of replicas, and conditions that apply to a single replica."""
    constraints = problem.constraints
    if number != "auto" and not 1 <= number <= len(problem.fleet.devices):
        raise UsageError(
            f"{number} replicas of a model on {len(problem.fleet.devices)} devices",
            hint="use at most one replica per device",
        )
    for is_given, name in (
        (problem.device_map is not None, "a device map"),
        (bool(constraints.pins), "a pin"),
        (constraints.strategy != "auto", f"the strategy {constraints.strategy}"),
        (constraints.offload, "offloading"),
        (problem.largest is not None, f"the largest {problem.largest}"),
    ):
        if is_given:
            raise UsageError(
                f"{name} applies to a single replica, and several are requested",
                hint="omit one of them",
            )


class _GroupSearch:
    """The search for the best assignment: plan each possible group once, then combine groups."""

    def __init__(self, profile: Profile, problem: PlanProblem) -> None:
        self._profile = profile
        self._problem = problem
        self._objective = self._objective_on(problem.fleet)
        self._kinds = exchangeable(problem.fleet)
        self._counts = tuple(len(kind) for kind in self._kinds)
        self._plans: dict[Counts, Plan] = {}
        if math.prod((count + 1) * (count + 2) // 2 for count in self._counts) > _MAX_PAIRS:
            raise UsageError(
                f"{len(problem.fleet.devices)} devices of {len(self._kinds)} kinds allow too many "
                "assignments",
                hint="use fewer devices, or give similar ones equal budgets",
            )

    def _objective_on(self, fleet: Fleet) -> Objective:
        """Resolve the problem's objective on a fleet: "auto" depends on the speeds of its GPUs."""
        workload = next(with_chunks(self._problem.workload))
        costs = Costs(self._profile, workload, self._problem.replay_cache)
        return resolve_objective(self._problem.objective, costs, fleet)

    def deal(self) -> dict[int, _Deal]:
        """Return the best assignment of the fleet's devices for each possible number of groups."""
        # A group is a candidate if it holds a replica. Unless every device must be used, it must
        # also be minimal: if a smaller group within it holds a replica, it wastes a device.
        states = [*itertools.product(*(range(count + 1) for count in self._counts))]
        for counts in sorted(filter(any, states), key=sum):
            wastes = any(all(map(int.__le__, part, counts)) for part in self._plans)
            if self._problem.use_all or not wastes:
                plan = self._plan_on(self._take_devices([*map(list, self._kinds)], counts))
                if plan is not None:
                    self._plans[counts] = plan
        deals: dict[Counts, dict[int, _Deal]] = {}
        for state in states:
            deals[state] = self._deal_state(state, deals)
        return {number: deal for number, deal in deals[self._counts].items() if number}

    def plans_of(self, deal: _Deal) -> Replicas:
        """Return the plans of an assignment, on the first devices of each kind."""
        free = [*map(list, self._kinds)]
        groups = sorted(self._take_devices(free, counts) for counts in deal.groups)
        plans = [plan for plan in map(self._plan_on, groups) if plan is not None]
        assert len(plans) == len(groups), "the same kind of group has a plan"
        names = self._problem.fleet.names
        return Replicas(
            plans=tuple(plans),
            idle=tuple(names[index] for index in sorted(itertools.chain(*free))),
            objective=self._objective,
            value=abs(deal.value),
        )

    def restrict(self, plan: Plan, request: PlanRequest) -> Plan:
        """Set the request of a replica's plan to the GPUs of its group, so that it can be repeated.

        GPUs without UUIDs can't be named: then the request has no `gpus`.
        """
        names, fleet = plan.fleet.names, self._problem.fleet
        uuids = [device.uuid for device in plan.fleet.devices]
        gpus = ",".join(uuids) if all(uuids) else ""
        is_same = self._objective_on(plan.fleet) == self._objective
        again = replace(
            request,
            gpus=request.gpus if len(names) == len(fleet.names) else gpus,
            objective=request.objective if is_same else self._objective,
            constraints=_restrict(request.constraints, fleet, names),
        )
        return replace(plan, request=again)

    def _take_devices(self, free: Sequence[list[int]], counts: Counts) -> tuple[int, ...]:
        """Remove `counts[k]` devices of each kind k from `free`, the first ones; return them."""
        devices = [kind.pop(0) for kind, num in zip(free, counts, strict=True) for _ in range(num)]
        return tuple(sorted(devices))

    def _deal_state(self, state: Counts, deals: dict[Counts, dict[int, _Deal]]) -> dict[int, _Deal]:
        """Return the best assignment of a state's devices for each number of groups.

        `deals` has the assignments of all smaller states.
        """
        if not any(state):
            return {0: _Deal(0, self._join(()), ())}
        # The first free device stays idle, or one of the groups holds it: so every assignment is
        # reached, and all smaller states come earlier in the order of `product`. Values are joined
        # by a minimum or a sum, so the best assignment contains a best assignment of the rest.
        kind = next(kind for kind, count in enumerate(state) if count)
        best: dict[int, _Deal] = {}
        if not self._problem.use_all:
            best |= deals[*state[:kind], state[kind] - 1, *state[kind + 1 :]]
        for counts, plan in self._plans.items():
            rest = tuple(have - take for have, take in zip(state, counts, strict=True))
            if not counts[kind] or min(rest) < 0:
                continue
            for number, deal in deals[rest].items():
                value = self._join((deal.value, self._worth(plan)))
                longer = _Deal(deal.devices - sum(counts), value, (counts, *deal.groups))
                if number + 1 not in best or longer[:2] > best[number + 1][:2]:
                    best[number + 1] = longer
        return best

    def _plan_on(self, devices: Sequence[int]) -> Plan | None:
        """Plan a replica that uses all of these devices; None if no plan fits."""
        fleet = self._problem.fleet
        names = [fleet.names[index] for index in devices]
        group = replace(
            self._problem,
            fleet=fleet.only(names),
            objective=self._objective,
            use_all=True,
            gpus="",
            constraints=_restrict(self._problem.constraints, fleet, names),
        )
        try:
            return place_best(self._profile, group) or None
        except UsageError:
            return None  # more devices than blocks

    def _worth(self, plan: Plan) -> float:
        """Return the value of a group's plan, converted so that larger is better."""
        if self._objective in ("headroom", "pages"):
            return plan.value
        return -plan.value if self._objective == "latency" else 1.0 / plan.value

    def _join(self, values: Sequence[float]) -> float:
        """Return the value of several groups: the sum for throughput and pages, else the least."""
        if self._objective in ("throughput", "pages"):
            return math.fsum(values)
        return min(values, default=math.inf)


def replicas_for(
    checkpoint: Checkpoint,
    problem: PlanProblem,
    number: int | Literal["auto"],
    find: Find,
    *,
    suggest: bool = True,
) -> Replicas:
    """Plan the replicas of a checkpoint; `find` returns its profile for a workload."""
    say("planning")
    workload = workload_for(checkpoint, problem.workload)
    if workload.quantize == "auto":
        raise UsageError(
            "several replicas need a fixed quantization",
            hint="set quantize to none, int8, int4 or nf4",
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

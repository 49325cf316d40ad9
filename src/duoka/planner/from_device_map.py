"""A plan for a device map that a person wrote: judged, forecast, and compared with duoka's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from duoka.base.units import format_bytes
from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.costs import Costs
from duoka.forecast.forecast import Forecast
from duoka.forecast.profile import Profile
from duoka.forecast.replay_training import replay_of
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import Workload

from . import planner
from .device_map import Judgement, judge
from .page_count import fill
from .placement import Placement
from .plan import Plan
from .planner import check_context, with_chunks
from .reasons import Reason, chunk_reason, crossing_values, room_reasons
from .request import PlanProblem
from .room import is_tight, room_bytes
from .search import UnsearchableError

OBJECTIVE = "given"
"""What a plan for a map has in the place of an objective: nothing was optimised."""


def plan(profile: Profile, problem: PlanProblem, *, source: str = "") -> Plan:
    """The plan for the problem's device map, if that is complete and fits."""
    return _judged(profile, problem).plan(source)


def attempt(profile: Profile, problem: PlanProblem) -> Plan | None:
    """The plan that `plan` finds; None where the map doesn't fit."""
    try:
        return plan(profile, problem)
    except InfeasibleError:
        return None


def _judged(profile: Profile, problem: PlanProblem) -> _Judged:
    """The problem's map, judged."""
    assert problem.device_map is not None, "the planner answers without one"
    if problem.use_all or problem.objective != "auto":
        raise UsageError(
            "a device map says which GPUs are used, and how: nothing is left to optimise",
            hint="leave out the map, or the objective and `use_all`",
        )
    if problem.constraints.demands:
        raise UsageError(
            "a device map says where every module goes, and so would a strategy or pins",
            hint="leave out the map, or change it",
        )
    if problem.constraints.offload:
        raise UsageError(
            "a device map says where every module computes, and what is offloaded is duoka's to "
            "decide",
            hint="leave out the map, or the offload",
        )
    judgement = judge(problem.device_map, profile.outline, problem.fleet)
    check_context(problem.workload, profile.max_context_tokens, profile.model)
    return _Judged(profile, problem, judgement)


class _Judged:
    def __init__(self, profile: Profile, problem: PlanProblem, judgement: Judgement) -> None:
        self.profile = profile
        self.problem = problem
        self.notes = judgement.notes
        self.placement = Placement(entries=judgement.placed, fingerprint=profile.fingerprint)
        self.device_of = _devices(profile, self.placement)

    def plan(self, source: str) -> Plan:
        """The plan, with the largest chunk of the prompt that leaves room; else that fits."""
        fitting: list[tuple[Workload, list[StageBytes]]] = []
        for workload in with_chunks(self.problem.workload):
            needs = self._needs(workload)
            if all(need.free_bytes >= 0 for need in needs):
                fitting.append((workload, needs))
                if not any(map(is_tight, needs)):
                    break
        if not fitting:
            raise self._infeasible(needs)
        *_, last = fitting
        chosen = fitting[0] if any(map(is_tight, last[1])) else last
        return self._plan_with(*chosen, source)

    def _needs(self, workload: Workload) -> list[StageBytes]:
        devices = self.placement.devices
        return [
            self._need(name, workload, place=len(devices) - number)
            for number, name in enumerate(devices)
        ]

    def _need(self, name: str, workload: Workload, *, place: int) -> StageBytes:
        device = self.problem.fleet.device(name)
        blocks = [index for index, at in enumerate(self.device_of) if at == name]
        replay = replay_of(self.profile, workload, place=place)
        peaks = replay.run(blocks, device.budget_bytes, device_of=self.device_of)
        # Where it doesn't fit, what it would need without a limit.
        peaks = peaks or replay.run(blocks, device_of=self.device_of)
        assert peaks is not None, "nothing limits this run"
        return peaks.placed(device)

    def _plan_with(self, workload: Workload, needs: list[StageBytes], source: str) -> Plan:
        problem, profile, costs = self.problem, self.profile, Costs(self.profile, workload)
        plan = Plan(
            source=source,
            model=profile.model,
            fingerprint=profile.fingerprint,
            fleet=problem.fleet,
            workload=workload,
            placement=self.placement,
            forecast=Forecast(
                devices=tuple(needs),
                seconds=costs.latency.seconds_of(self._runs(costs), problem.fleet),
            ),
            objective=OBJECTIVE,
            value=0.0,
            bound=0.0,
            binding_device=needs[0].device,
            request=problem.request,
            needs_movers=profile.needs_movers,
        )
        if workload.is_paged:
            roomy = costs if any(map(is_tight, needs)) else costs.leaving(room_bytes)
            plan = fill(plan, roomy, self._runs(costs), self.device_of)
        needs = [*plan.forecast.devices]
        tightest = min(needs, key=lambda need: need.free_bytes)
        free = float(tightest.free_bytes)
        reasons = self._reasons(workload, tightest, self._automatic())
        return replace(
            plan,
            value=free,
            bound=free,
            binding_device=tightest.device,
            why=(*reasons, *room_reasons(needs, chosen=False)),
        )

    def _automatic(self) -> Plan | None:
        """What duoka would have done; None where the GPUs are more than can be searched."""
        try:
            return planner.attempt(self.profile, replace(self.problem, device_map=None))
        except UnsearchableError:
            return None

    def _reasons(
        self, workload: Workload, tightest: StageBytes, automatic: Plan | None
    ) -> Iterator[Reason]:
        crossings = _crossings(self.device_of)
        yield Reason("device-map", crossing_values(crossings, tightest.free_bytes))
        yield from (Reason("note", {"text": f"{note}."}) for note in self.notes)
        if automatic is not None and automatic.device_map != self.placement.device_map:
            crossings = _crossings(_devices(self.profile, automatic.placement))
            least = min(device.free_bytes for device in automatic.forecast.devices)
            values = {"devices": ", ".join(automatic.devices), **crossing_values(crossings, least)}
            yield Reason("own-plan", values)
        yield from chunk_reason(self.problem.workload, workload)

    def _runs(self, costs: Costs) -> list[tuple[str, int, int]]:
        """Each run of blocks on one device is a stage."""
        stages: list[tuple[str, int, int]] = []
        for place, block in enumerate(costs.chain):
            name = self.device_of[block]
            if stages and stages[-1][0] == name:
                stages[-1] = (name, stages[-1][1], place + 1)
            else:
                stages.append((name, place, place + 1))
        return stages

    def _infeasible(self, needs: list[StageBytes]) -> InfeasibleError:
        over = [need for need in needs if need.free_bytes < 0]
        missing = [max(need.allocated_bytes - need.budget_bytes, 1) for need in over]
        workload = self.problem.workload
        shortages = "; ".join(map(_shortage, over))
        return InfeasibleError(
            f"the device map does not fit: {shortages}. {self.profile.model}, "
            f"{workload.context_tokens} tokens, batch {workload.batch}",
            hint="spread the model over more GPUs",
            shortfall_bytes=sum(missing),
        )


def _devices(profile: Profile, placement: Placement) -> list[str]:
    """The device of every block."""
    devices: list[str] = []
    for block in profile.blocks:
        # What the caller does has no module; it happens where the block is that it's tied to.
        root = None if block.tied_to is None else devices[block.tied_to]
        device = placement.device_of(block.modules[0]) if block.modules else root
        assert device is not None, "a judged placement is complete"
        devices.append(device)
    return devices


def _crossings(device_of: list[str]) -> int:
    """How often one token goes from one device to another, on its way through the blocks."""
    return sum(before != after for before, after in pairwise(device_of))


def _shortage(need: StageBytes) -> str:
    size, budget = need.allocated_bytes, need.budget_bytes
    if size <= budget:
        return f"on {need.device} its {format_bytes(budget)} are too fragmented"
    return (
        f"{need.device} needs {format_bytes(size)} of a budget of "
        f"{format_bytes(budget)}: {format_bytes(size - budget)} are missing"
    )

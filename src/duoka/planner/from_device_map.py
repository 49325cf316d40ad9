"""A plan for a user's device map: validated, forecast, and compared with the planner's own plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from duoka.base.units import format_bytes
from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.costs import Costs
from duoka.forecast.forecast import Forecast
from duoka.forecast.profile import Profile
from duoka.forecast.replay_training import replay_of
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import Workload

from .device_map import judge
from .limits import check_context
from .page_count import fill
from .placement import Placement, runs_of
from .plan import Plan
from .planner import NoPlan, place_best, with_chunks
from .reasons import Reason, chunk_reason, crossing_values, room_reasons
from .request import PlanProblem
from .room import is_tight, room_bytes
from .search import UnsearchableError

OBJECTIVE = "given"
"""The objective of a plan for a device map: the placement is given, nothing is optimized."""


def follow_map(profile: Profile, problem: PlanProblem) -> Plan | NoPlan:
    """Plan for the problem's device map, with the best prefill chunk.

    That is the largest chunk with the recommended free memory on every device, or else the largest
    chunk that fits. Raises PlacementError with all faults of the map.
    """
    # Chunks are tried from the largest on, until one leaves the recommended free memory. Example:
    #
    #   chunk           fits    recommended free memory
    #   whole prompt    no
    #   8192 tokens     yes     no                         fitting[0]
    #   4096 tokens     yes     yes                        fitting[-1]: chosen
    #
    # If no chunk leaves the recommended memory, smaller chunks only cost time, and the largest that
    # fits is chosen. If none fits, `stages` are those of the smallest chunk, the last one tried.
    _refuse_conflicts(problem)
    judgement = judge(problem.device_map, profile.outline, problem.fleet)
    check_context(problem.workload, profile.max_context_tokens, profile.model)
    placement = Placement(entries=judgement.placed, fingerprint=profile.fingerprint)
    mapped = _MappedModel(profile, problem, placement, placement.devices_of(profile))
    fitting: list[tuple[Workload, list[StageBytes]]] = []
    for workload in with_chunks(problem.workload):
        stages = mapped.forecast(workload)
        if all(stage.free_bytes >= 0 for stage in stages):
            fitting.append((workload, stages))
            if not any(map(is_tight, stages)):
                break
    if not fitting:
        return NoPlan(lambda: _describe_shortage(profile, problem, stages))
    *_, smallest = fitting
    best = fitting[0] if any(map(is_tight, smallest[1])) else smallest
    return mapped.plan(*best, judgement.notes)


def _refuse_conflicts(problem: PlanProblem) -> None:
    """Refuse an objective, a strategy, pins or offloading together with a device map."""
    for is_given, decided, hint in (
        (
            problem.use_all or problem.objective != "auto",
            "the GPUs: objective and use_all have no effect",
            "omit the map, or the objective and use_all",
        ),
        (
            problem.constraints.demands,
            "the place of every module: a strategy or pins conflict with it",
            "omit the map, or change it",
        ),
        (
            problem.constraints.offload,
            "where modules run: it can't be combined with offload",
            "omit the map, or the offload",
        ),
        (
            problem.constraints.experts == "host",
            "where experts are: it can't be combined with experts in host memory",
            "omit the map, or --experts",
        ),
    ):
        if is_given:
            raise UsageError(f"a device map already decides {decided}", hint=hint)


@dataclass(frozen=True, slots=True)
class _MappedModel:
    """A model placed by a device map; `device_of` has the device of every block."""

    profile: Profile
    problem: PlanProblem
    placement: Placement
    device_of: list[str]

    def forecast(self, workload: Workload) -> list[StageBytes]:
        """Return the peak bytes of each device, by a replay; they may exceed its budget."""
        # A map may use a device for several runs of blocks (0, 1, 0): all blocks of a device are
        # replayed together, and with `device_of` the replay counts copies of tensors that arrive by
        # way of a third device. A device that exceeds its budget is replayed again without a limit,
        # for the numbers of the error.
        devices = self.placement.devices
        stages = []
        for number, name in enumerate(devices):
            device = self.problem.fleet.device(name)
            blocks = [index for index, at in enumerate(self.device_of) if at == name]
            replay = replay_of(self.profile, workload, place=len(devices) - number)
            peaks = replay.run(blocks, device.budget_bytes, device_of=self.device_of)
            peaks = peaks or replay.run(blocks, device_of=self.device_of)
            assert peaks is not None, "there is no limit"
            stages.append(peaks.place_on(device))
        return stages

    def plan(self, workload: Workload, stages: Sequence[StageBytes], notes: Sequence[str]) -> Plan:
        """Make the plan from the peak bytes of its devices; its value is the least free memory."""
        problem, profile, costs = self.problem, self.profile, Costs(self.profile, workload)
        runs = runs_of(self.device_of, costs.chain)
        plan = Plan(
            source="",
            model=profile.model,
            fingerprint=profile.fingerprint,
            fleet=problem.fleet,
            workload=workload,
            placement=self.placement,
            forecast=Forecast(
                devices=tuple(stages), seconds=costs.latency.seconds_of(runs, problem.fleet)
            ),
            objective=OBJECTIVE,
            value=0.0,
            bound=0.0,
            binding_device=stages[0].device,
            request=problem.request,
            needs_movers=profile.needs_movers,
        )
        if workload.is_paged:
            roomy = costs if any(map(is_tight, stages)) else costs.leaving(room_bytes)
            plan = fill(plan, roomy, runs, self.device_of)
        stages = plan.forecast.devices
        tightest = min(stages, key=lambda stage: stage.free_bytes)
        reasons = self._reasons(workload, tightest, notes)
        return replace(
            plan,
            value=float(tightest.free_bytes),
            bound=float(tightest.free_bytes),
            binding_device=tightest.device,
            why=(*reasons, *room_reasons(stages, chosen=False)),
        )

    def _reasons(
        self, workload: Workload, tightest: StageBytes, notes: Sequence[str]
    ) -> Iterator[Reason]:
        """Yield the reasons of the plan, compared with the planner's own plan if it differs."""
        crossings = _crossings(self.device_of)
        yield Reason("device-map", crossing_values(crossings, tightest.free_bytes))
        yield from (Reason("note", {"text": f"{note}."}) for note in notes)
        try:
            automatic = place_best(self.profile, replace(self.problem, device_map=None))
        except UnsearchableError:  # too many GPUs for a search
            automatic = None
        if automatic and automatic.device_map != self.placement.device_map:
            crossings = _crossings(automatic.placement.devices_of(self.profile))
            least_free = min(device.free_bytes for device in automatic.forecast.devices)
            values = crossing_values(crossings, least_free)
            yield Reason("own-plan", {"devices": ", ".join(automatic.devices), **values})
        yield from chunk_reason(self.problem.workload, workload)


def _describe_shortage(
    profile: Profile, problem: PlanProblem, stages: Sequence[StageBytes]
) -> InfeasibleError:
    """Return the error for devices that exceed their budgets, with the missing bytes of each."""
    overfull = [stage for stage in stages if stage.free_bytes < 0]
    missing = [max(stage.allocated_bytes - stage.budget_bytes, 1) for stage in overfull]
    workload = problem.workload
    shortages = "; ".join(map(_describe_device, overfull))
    return InfeasibleError(
        f"the device map does not fit: {shortages}. {profile.model}, "
        f"{workload.context_tokens} tokens, batch {workload.batch}",
        hint="use more GPUs",
        shortfall_bytes=sum(missing),
    )


def _crossings(device_of: Sequence[str]) -> int:
    """Count the transfers between devices per token: changes of device from block to block."""
    return sum(source != target for source, target in pairwise(device_of))


def _describe_device(stage: StageBytes) -> str:
    """Describe by how much a device exceeds its budget, or that fragmentation is the cause."""
    size, budget = stage.allocated_bytes, stage.budget_bytes
    if size <= budget:
        return (
            f"on {stage.device} the budget of {format_bytes(budget)} is exceeded because of "
            "fragmentation"
        )
    return (
        f"{stage.device} needs {format_bytes(size)} of a budget of "
        f"{format_bytes(budget)}: {format_bytes(size - budget)} are missing"
    )

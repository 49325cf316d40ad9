"""The planner: profile, fleet and workload → placement, forecast and why; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from duoka.base.units import format_bytes, format_count
from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.costs import Costs
from duoka.forecast.forecast import Forecast
from duoka.forecast.latency import Seconds
from duoka.forecast.profile import Profile
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet

from . import search
from .limits import limits_for, reserves
from .offload import candidates, lightest
from .page_count import fill
from .placement import Placement
from .plan import Plan
from .reasons import (
    Reason,
    chunk_reason,
    demand_reasons,
    gpus_reason,
    offload_reason,
    room_reasons,
)
from .request import PlanProblem
from .room import preferences
from .search import NO_LIMITS, KnownBytes, NoPlacement, Objective, PlacementLimits, Solution

_SMALLEST_CHUNK_TOKENS = 512
_LARGEST_CHUNK_TOKENS = 8192
_LEAST_TOLD = 4096
_STEP_TOKENS = (2048, 1024, 512)  # of many requests together, over a paged cache


def solve(profile: Profile, problem: PlanProblem, *, source: str = "") -> Plan:
    """Find the best placement.

    The fewest devices that hold the workload and leave room (`room.preferences`) are used, all of
    them with `use_all`; among the placements on so many devices the one that is best for the
    objective is taken, and it is the optimum over all contiguous cuts and all orders of the devices
    that obey the constraints. Their strategies "balanced" and "sequential" choose otherwise
    (`search.search`). Where nothing leaves room the fewest devices that hold the workload are used.
    The CPU is used only where there is nothing else.
    """
    check_context(problem.workload, profile.max_context_tokens, profile.model)
    if problem.constraints.offload:
        _refuse_offload(problem.workload)
    plan = _solve(profile, problem, source)
    if isinstance(plan, NoPlacement):
        raise _infeasible(profile, _ready(profile, problem), plan)
    return plan


def attempt(profile: Profile, problem: PlanProblem, *, leave_room: bool = True) -> Plan | None:
    """The plan that `solve` finds; None where it would say what fits instead, which takes long.

    Without `leave_room` it is the plan where every byte may be taken.
    """
    plan = _solve(profile, problem, "", leave_room=leave_room)
    return None if isinstance(plan, NoPlacement) else plan


def conceivable(profile: Profile, problem: PlanProblem) -> bool:
    """Whether lower bounds leave a plan possible; without it there is none. Nothing is replayed."""
    ready = _ready(profile, problem)
    if _conceivable(profile, ready):
        return True
    if not problem.constraints.offload or problem.workload.training is not None:
        return False
    if not _conceivable(lightest(profile), ready):
        return False
    # Where a plan is possible, it mostly is with all that may be offloaded.
    runs = reversed([blocks for _, blocks in candidates(profile)])
    return any(_conceivable(profile.offloading(blocks), ready) for blocks in runs)


def _conceivable(profile: Profile, ready: PlanProblem) -> bool:
    return search.conceivable(
        _chunked(profile, ready),
        ready.fleet,
        use_all=ready.use_all,
        strategy=ready.constraints.strategy,
        limits=_limits(ready),
    )


def _chunked(profile: Profile, problem: PlanProblem) -> list[Costs]:
    """The costs of each chunk that the prompt may run in, the largest first."""
    return [
        Costs(profile, workload, problem.replay_cache) for workload in with_chunks(problem.workload)
    ]


def _refuse_offload(workload: Workload) -> None:
    """Refuse what weights in the host's memory can't be used for."""
    if workload.training is not None:
        raise UsageError(
            "weights that lie in the host's memory can't be trained",
            hint="leave out the offload: gradient checkpointing or LoRA take less memory",
        )
    if workload.quantize != "none":
        raise UsageError(
            f"weights are quantized ({workload.quantize}) or offloaded, not both",
            hint="leave out one of the two",
        )


def _solve(
    profile: Profile, problem: PlanProblem, source: str, *, leave_room: bool = True
) -> Plan | NoPlacement:
    assert problem.device_map is None, "from_device_map follows maps"
    ready = _ready(profile, problem)
    plan = _best(profile, ready, source, leave_room=leave_room)
    may_offload = problem.constraints.offload and problem.workload.training is None
    if may_offload and isinstance(plan, NoPlacement):
        plan = _offloaded(profile, replace(problem, limits=ready.limits), source) or plan
    if ready.fleet == problem.fleet or isinstance(plan, NoPlacement):
        return plan
    return replace(plan, why=(*plan.why, Reason("cpu-unused")))


def _ready(profile: Profile, problem: PlanProblem) -> PlanProblem:
    """The problem as the search is asked: on GPUs alone, with its constraints understood."""
    fleet, limits = without_cpu(problem.fleet), problem.limits
    if limits is None:
        chain = [index for index, block in enumerate(profile.blocks) if block.tied_to is None]
        limits = limits_for(problem.constraints, profile, chain, fleet)
    return replace(problem, fleet=fleet, limits=limits)


def _limits(problem: PlanProblem) -> PlacementLimits:
    return NO_LIMITS if problem.limits is None else problem.limits


def _offloaded(profile: Profile, problem: PlanProblem, source: str) -> Plan | None:
    """The plan with the fewest bytes of weights in the host's memory; None where that won't do."""
    gpus = without_cpu(problem.fleet)
    most = [device.budget_bytes for device in problem.fleet.devices if device not in gpus.devices]
    # Whatever the cuts: all stages together hold at least what one stage of everything does.
    least = min(int(costs.lower_bound_bytes[0, -1]) for costs in _chunked(profile, problem))
    missing = least - gpus.budget_bytes
    problem = replace(problem, fleet=gpus)
    if not _conceivable(lightest(profile), problem):
        return None
    for num_bytes, blocks in candidates(profile):
        if num_bytes < missing or any(num_bytes > limit for limit in most):
            continue
        streaming = profile.offloading(blocks)
        if _conceivable(streaming, problem):
            plan = _best(streaming, problem, source)
            if not isinstance(plan, NoPlacement):
                unknown = () if most else (Reason("host-unknown"),)
                return replace(plan, why=(*plan.why, *unknown))
    return None


def objective_of(problem: PlanProblem) -> Objective:
    """What is optimised for a problem, with "auto" resolved for all of its devices."""
    if problem.objective != "auto":
        return problem.objective
    if problem.workload.is_paged and problem.workload.pages is None:
        return "pages"
    known = {device.speeds for device in problem.fleet.devices}
    unknown = any(device.memory_bytes_per_second is None for device in problem.fleet.devices)
    return "headroom" if unknown or len(known) == 1 else "latency"


def without_cpu(fleet: Fleet) -> Fleet:
    """The GPUs of a fleet; the CPU too where it has nothing else."""
    gpus = [name for name in fleet.names if name != "cpu"]
    return fleet.only(gpus) if gpus else fleet


def _best(
    profile: Profile, problem: PlanProblem, source: str, *, leave_room: bool = True
) -> Plan | NoPlacement:
    """The first plan that is found, in the order of what is preferred."""
    chunked = _chunked(profile, problem)
    *roomier, whatever_fits = preferences(chunked) if leave_room else (chunked,)
    for tried in roomier:
        with suppress(UsageError):  # pins may forbid the further devices that room would take
            plan = _on_fewest(tried, problem, source)
            if isinstance(plan, Plan):
                return plan
    return _on_fewest(whatever_fits, problem, source)


def _on_fewest(chunked: Sequence[Costs], problem: PlanProblem, source: str) -> Plan | NoPlacement:
    """The plan with the fewest devices, and of those the one with the largest chunk."""
    shortage = NoPlacement()
    memories: list[KnownBytes] = []
    try:
        for limits in _limits_to_try(chunked, problem):
            # Only now: mostly it is known by then where nothing fits.
            memories = memories or [KnownBytes(costs, problem.fleet) for costs in chunked]
            for costs, memory in zip(chunked, memories, strict=True):
                limited = replace(problem, limits=limits)
                try:
                    solution, peaks = _search(costs, limited, memory)
                    plan = _plan(costs, solution, peaks, problem, source)
                    return _with_pages(plan, costs, solution)
                except NoPlacement as none:
                    shortage |= none
    except NoPlacement as none:
        return none  # whatever the number
    return shortage


def _limits_to_try(chunked: Sequence[Costs], problem: PlanProblem) -> Iterator[PlacementLimits]:
    """One number of devices after the other, where fewer are better than larger chunks."""
    limits = _limits(problem)
    wants_pages = chunked[0].page_bytes is not None and problem.objective in ("auto", "pages")
    is_free = not (problem.use_all or wants_pages) and problem.constraints.strategy == "auto"
    if not is_free or len(chunked) == 1:  # of pages no number of devices has enough
        yield limits
        return
    most = min(len(problem.fleet.devices), chunked[0].num_blocks)
    for number in range(search.fewest(chunked, problem.fleet, limits=limits), most + 1):
        yield replace(limits, num_devices=number)


def _search(
    costs: Costs, problem: PlanProblem, memory: KnownBytes | None
) -> tuple[Solution, list[StageBytes]]:
    """The optimum, and the peaks of its stages."""
    while True:
        solution = search.search(
            costs,
            problem.fleet,
            objective=problem.objective,
            use_all=problem.use_all,
            strategy=problem.constraints.strategy,
            limits=_limits(problem),
            memory=memory,
        )
        memory = None  # copies by way of other devices may refuse what it takes as exact
        peaks = [*_peaks(costs, solution, problem.fleet)]
        known = [stage for stage in peaks if stage is not None]
        if len(known) == len(peaks):
            return solution, known


def _peaks(costs: Costs, solution: Solution, fleet: Fleet) -> Iterator[StageBytes | None]:
    """Of each stage; None where copies by way of other devices are too much for its own."""
    device_of = _device_of(costs, solution, fleet)
    for number, stage in enumerate(solution.stages):
        budget = fleet.devices[stage.device].budget_bytes
        if costs.has_returns:
            yield costs.stage_bytes_where(stage.start, stage.stop, budget, device_of)
        else:
            place = len(solution.stages) - number
            yield costs.stage_bytes(stage.start, stage.stop, budget, place=place)


def with_chunks(workload: Workload) -> Iterator[Workload]:
    """Yield the workload with its prefill chunk resolved: the whole prompt, then smaller chunks."""
    if workload.images and workload.vision_batch == "auto":
        workload = replace(workload, vision_batch=None)
    if workload.prefill_chunk_tokens != "auto":
        yield workload
        return
    if workload.is_paged:
        sizes = (min(tokens, workload.context_tokens) for tokens in _STEP_TOKENS)
        yield from (
            replace(workload, prefill_chunk_tokens=tokens) for tokens in dict.fromkeys(sizes)
        )
        return
    yield replace(workload, prefill_chunk_tokens=None)
    if workload.training is not None or workload.images:
        return  # a sequence is learnt from whole; with images each chunk has a profile of its own
    chunk = _LARGEST_CHUNK_TOKENS
    while chunk >= _SMALLEST_CHUNK_TOKENS:
        if chunk < workload.prompt_tokens:
            yield replace(workload, prefill_chunk_tokens=chunk)
        chunk //= 2


def check_context(workload: Workload, limit: int | None, model: str) -> None:
    """Refuse a context that is longer than a model was made for."""
    if limit is not None and workload.context_tokens > limit:
        raise UsageError(
            f"{workload.prompt_tokens} prompt and {workload.new_tokens} new tokens are "
            f"{workload.context_tokens}; {model} was made for {limit}",
            hint=f"ask for a context of at most {limit} tokens",
        )


def _device_of(costs: Costs, solution: Solution, fleet: Fleet) -> list[str]:
    """The device of every block."""
    devices: dict[int, str] = {}
    for stage in solution.stages:
        name = fleet.devices[stage.device].name
        devices.update(dict.fromkeys(costs.blocks_of(stage.start, stage.stop), name))
    return [devices[index] for index in range(len(costs.profile.blocks))]


def _plan(
    costs: Costs,
    solution: Solution,
    stage_peaks: list[StageBytes],
    problem: PlanProblem,
    source: str,
) -> Plan:
    profile, fleet = costs.profile, problem.fleet
    device_of = _device_of(costs, solution, fleet)
    forecasts = tuple(
        peaks.placed(fleet.devices[stage.device])
        for stage, peaks in zip(solution.stages, stage_peaks, strict=True)
    )
    entries = tuple(
        (module, device_of[index])
        for index, block in enumerate(profile.blocks)
        for module in block.modules
    )
    reasons = (*_reasons(costs, solution, problem), *room_reasons(forecasts, chosen=True))
    return Plan(
        source=source,
        model=profile.model,
        fingerprint=profile.fingerprint,
        fleet=fleet,
        workload=costs.workload,
        placement=Placement(entries=entries, fingerprint=profile.fingerprint),
        forecast=Forecast(
            devices=forecasts,
            seconds=_seconds(costs, solution, fleet),
            host_bytes=costs.streamed_bytes(0, costs.num_blocks),
            copy_seconds=_copy_seconds(costs, solution, fleet),
        ),
        objective=solution.objective,
        value=float(solution.value),
        bound=float(solution.bound),
        binding_device=fleet.devices[solution.binding_device].name,
        request=problem.request,
        why=reasons,
        offloaded=profile.offloaded,
        needs_movers=profile.needs_movers,
    )


def _with_pages(plan: Plan, costs: Costs, solution: Solution) -> Plan:
    """The plan with as many pages as fit, where there are to be pages."""
    if not costs.workload.is_paged:
        return plan
    names = plan.fleet.names
    runs = [(names[stage.device], stage.start, stage.stop) for stage in solution.stages]
    device_of = _device_of(costs, solution, plan.fleet) if costs.has_returns else None
    return fill(plan, costs, runs, device_of)


def _seconds(costs: Costs, solution: Solution, fleet: Fleet) -> Seconds | None:
    names = fleet.names
    return costs.latency.seconds_of(
        [(names[stage.device], stage.start, stage.stop) for stage in solution.stages], fleet
    )


def _copy_seconds(costs: Costs, solution: Solution, fleet: Fleet) -> float | None:
    """What copying weights from the host takes in each step, as far as the links are known."""
    total = 0.0
    for stage in solution.stages:
        size = costs.streamed_bytes(stage.start, stage.stop)
        rate = fleet.devices[stage.device].host_bytes_per_second
        if size and rate is None:
            return None
        total += size / rate if rate else 0.0
    return total or None


def _reasons(costs: Costs, solution: Solution, problem: PlanProblem) -> Iterator[Reason]:
    used, available = len(solution.stages), len(problem.fleet.devices)
    wants_few = problem.constraints.strategy == "auto" and not problem.use_all
    if wants_few and solution.objective != "pages":
        first = problem.fleet.devices[solution.stages[0].device].name
        tight = used > 1 and costs.room is not None and _may_fit_fewer(problem, costs, used)
        yield from gpus_reason(
            used, available, first, is_limited=bool(problem.limits), lack_room=tight
        )
    names = problem.fleet.names
    devices = [names[stage.device] for stage in solution.stages]
    reserved = reserves(problem.constraints, problem.fleet)
    yield from demand_reasons(problem.constraints, problem.fleet, reserved, devices)
    if costs.has_ties and used > 1:
        yield Reason("tied")
    yield from (Reason("note", {"text": note}) for note in costs.profile.notes)
    if problem.constraints.offload:
        yield offload_reason(
            len(costs.profile.offloaded),
            costs.streamed_bytes(0, costs.num_blocks),
            _copy_seconds(costs, solution, problem.fleet),
        )
    yield from chunk_reason(problem.workload, costs.workload)


def _may_fit_fewer(problem: PlanProblem, costs: Costs, used: int) -> bool:
    """Whether bounds leave it possible that fewer devices hold it and leave no room."""
    return search.conceivable(
        _chunked(costs.profile, problem),
        problem.fleet,
        limits=replace(_limits(problem), num_devices=used - 1),
    )


def _infeasible(profile: Profile, problem: PlanProblem, shortage: NoPlacement) -> InfeasibleError:
    budget = sum(device.budget_bytes for device in problem.fleet.devices)
    workload, missing = problem.workload, shortage.shortfall_bytes()
    # As a lower bound it may be next to nothing, where it is the cut that doesn't work out.
    least = f"; at least {format_bytes(missing)} are missing" if missing >= _LEAST_TOLD else ""
    return InfeasibleError(
        f"{profile.model} does not fit: {format_bytes(profile.weight_bytes)} of weights, "
        f"{workload.context_tokens} tokens, batch {workload.batch}; "
        f"{format_count(len(problem.fleet.devices), 'device')} with a budget of "
        f"{format_bytes(budget)} in all{least}{_in_the_way(profile, problem)}",
        hint="use more or larger GPUs, or a smaller model",
        shortfall_bytes=missing,
    )


def _in_the_way(profile: Profile, problem: PlanProblem) -> str:
    """Whether it is only what was demanded of the placement that doesn't fit."""
    constraints = problem.constraints
    if not constraints.demands:
        return ""
    free = replace(
        problem,
        constraints=replace(constraints, strategy="auto", pins=()),
        limits=NO_LIMITS,
    )
    if attempt(profile, free) is None:
        return ""
    said = [f"the strategy {constraints.strategy}"] if constraints.strategy != "auto" else []
    said += ["the pins"] if constraints.pins else []
    return f"; without {' and '.join(said)} it fits"

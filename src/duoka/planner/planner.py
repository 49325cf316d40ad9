"""The planner: a profile, a fleet and a workload become a placement, its forecast and its reasons.

The plan depends on the arguments alone: no file is read and no GPU is queried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from duoka.base.units import format_bytes, format_count
from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.costs import Costs
from duoka.forecast.forecast import Forecast
from duoka.forecast.profile import Profile
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import ALL_EXPERTS, Workload
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet

from . import search
from .expert_cache import caches_to_try, fetch_choices, first_cache_bytes
from .host_experts import HostSearch, no_host_experts
from .limits import host_of, limit_graphs, limits_for, refuse_unplannable, reserves
from .offload import candidates, lightest
from .page_count import fill
from .placement import Placement
from .plan import Plan
from .reasons import (
    Reason,
    chunk_reason,
    demand_reasons,
    faster_reasons,
    gpus_reason,
    host_reason,
    offload_reason,
    room_reasons,
)
from .request import PlanProblem
from .room import preferences
from .search import KnownBytes, NoPlacement, PlacementLimits, Solution
from .search.dynamic_programme import Stages

_CHUNK_TOKENS = (8192, 4096, 2048, 1024, 512)
_LEAST_REPORTED_BYTES = 4096
_STEP_TOKENS = (2048, 1024, 512)  # token budgets of a step, all running requests of a paged cache


@dataclass(frozen=True, slots=True)
class NoPlan:
    """The result for a problem without a plan; falsy. `describe` makes the error.

    The missing bytes of the error take a search of their own. Searches for suggestions fail often
    and don't report the error, so `describe` computes it on demand.
    """

    describe: Callable[[], InfeasibleError]

    def __bool__(self) -> Literal[False]:
        return False


def place_best(profile: Profile, problem: PlanProblem, *, leave_room: bool = True) -> Plan | NoPlan:
    """Find the best placement.

    The plan uses the fewest devices that hold the workload with the recommended free memory
    (`room.preferences`), or all devices with `use_all`. Among the placements on that number of
    devices it is optimal for the objective, over all contiguous cuts and all orders of the devices
    that satisfy the constraints. The strategies "balanced" and "sequential" follow other rules
    (`search.search`). Without `leave_room`, or if no placement leaves the recommended free memory,
    the plan uses the fewest devices that hold the workload. Modules run on the CPU only if the
    fleet has no GPU.
    """
    assert problem.device_map is None, "from_device_map follows maps"
    refuse_unplannable(profile, problem)
    gpu_problem = _restrict_to_gpus(profile, problem)
    plan: Plan | NoPlacement | None = None
    if problem.constraints.experts != "host":
        plan = _place_by_preference(profile, gpu_problem, leave_room=leave_room)
    if not isinstance(plan, Plan):
        plan = _place_with_host(profile, gpu_problem) or plan
    if plan is None:
        raise no_host_experts(profile, gpu_problem)
    if isinstance(plan, NoPlacement):
        shortage = plan
        gpus = gpu_problem.fleet.devices
        hosts = [device for device in problem.fleet.devices if device not in gpus]
        may_offload = problem.constraints.offload
        offloaded = _place_offloaded(profile, gpu_problem, hosts) if may_offload else None
        if offloaded is None:
            return NoPlan(lambda: _describe_shortage(profile, gpu_problem, shortage))
        plan = offloaded
    if gpu_problem.fleet == problem.fleet:
        return plan
    return replace(plan, why=(*plan.why, Reason("cpu-unused")))


def is_conceivable(profile: Profile, problem: PlanProblem) -> bool:
    """Return False if lower bounds rule out every placement; nothing is replayed."""
    gpu_problem = _restrict_to_gpus(profile, problem)
    has_experts = any(block.experts for block in profile.blocks)
    if has_experts and problem.constraints.experts != "gpu" and host_of(problem) is not None:
        return True
    if _fits_bounds(profile, gpu_problem):
        return True
    if not problem.constraints.offload:
        return False
    if not _fits_bounds(lightest(profile), gpu_problem):
        return False
    # The candidate with the most bytes on the host is the likeliest to fit, so it is tried first.
    runs = reversed([blocks for _, blocks in candidates(profile)])
    return any(_fits_bounds(profile.offloading(blocks), gpu_problem) for blocks in runs)


def _fits_bounds(profile: Profile, problem: PlanProblem) -> bool:
    """Return False if lower bounds rule out every placement with the offloads of the profile."""
    return search.is_conceivable(
        _chunked_costs(profile, problem),
        problem.fleet,
        use_all=problem.use_all,
        strategy=problem.constraints.strategy,
        limits=problem.limits,
    )


def _chunked_costs(profile: Profile, problem: PlanProblem) -> list[Costs]:
    """Return the costs of each prefill chunk, the largest chunk first."""
    return [
        Costs(profile, workload, problem.replay_cache) for workload in with_chunks(problem.workload)
    ]


def _restrict_to_gpus(profile: Profile, problem: PlanProblem) -> PlanProblem:
    """Remove the CPU from the problem's fleet, and translate pins to the profile's blocks."""
    fleet = without_cpu(problem.fleet)
    limits = limits_for(problem.constraints, profile, fleet)
    return replace(problem, fleet=fleet, limits=limits)


def _place_offloaded(
    profile: Profile, problem: PlanProblem, hosts: Sequence[Device]
) -> Plan | None:
    """Return the plan with the fewest bytes of weights in CPU memory; None if no plan fits.

    `hosts` has the fleet's CPU, or is empty if the CPU memory is unknown.
    """
    # Candidates come with ascending bytes, so the first one with a plan keeps the fewest bytes in
    # CPU memory. Two bounds skip most candidates: the offloaded bytes are fewer than the GPUs'
    # shortfall (whatever the cuts, all stages together hold at least the bytes of a single stage
    # with all blocks), or the lower bounds of the search don't fit with the candidate offloaded.
    least_bytes = min(
        int(costs.lower_bound_bytes[0, -1]) for costs in _chunked_costs(profile, problem)
    )
    missing_bytes = least_bytes - problem.fleet.budget_bytes
    if not _fits_bounds(lightest(profile), problem):
        return None
    for num_bytes, blocks in candidates(profile):
        if num_bytes < missing_bytes or any(num_bytes > host.budget_bytes for host in hosts):
            continue
        streaming = profile.offloading(blocks)
        if _fits_bounds(streaming, problem):
            plan = _place_by_preference(streaming, problem)
            if isinstance(plan, Plan):
                notes = () if hosts else (Reason("host-unknown"),)
                return replace(plan, why=(*plan.why, *notes))
    return None


def _place_with_host(profile: Profile, problem: PlanProblem) -> Plan | None:
    """Return the fastest plan with experts in host memory; None if there is none."""
    host = host_of(problem)
    has_experts = any(block.experts for block in profile.blocks)
    training = problem.workload.training
    if problem.constraints.experts == "gpu" or (training and training.method == "full"):
        return None
    if host is None or problem.find_profile is None or not has_experts:
        return None
    tried = (
        _place_experts(profile, problem, host, is_fetched=is_fetched)
        for is_fetched in fetch_choices(problem, host)
    )
    return next((plan for plan in tried if plan is not None), None)


def _place_experts(
    profile: Profile, problem: PlanProblem, host: Device, *, is_fetched: bool
) -> Plan | None:
    """Return the fastest plan with experts that the GPUs fetch, or else the CPU computes."""
    find, on_host = problem.find_profile, replace(problem.workload, host_experts=ALL_EXPERTS)
    assert find is not None, "the caller checks it"
    if is_fetched:
        on_host = replace(on_host, expert_cache_bytes=first_cache_bytes(profile, problem))
    hosted = find(on_host)
    hosted_problem = replace(problem, workload=on_host)
    if not _fits_bounds(hosted, hosted_problem):
        return None
    if problem.workload.training is not None:
        return _train_with_host(hosted, hosted_problem, host)
    for has_room in (True, False):
        for cache_bytes in caches_to_try(_chunked_costs(hosted, hosted_problem), problem):
            on_host = replace(on_host, expert_cache_bytes=cache_bytes)
            plan = _search_with_host(
                profile, find(on_host), replace(problem, workload=on_host), host, has_room
            )
            if plan is not None:
                return plan
    return None


def _search_with_host(
    profile: Profile, hosted: Profile, problem: PlanProblem, host: Device, has_room: bool
) -> Plan | None:
    """Return the fastest plan for a size of the caches; None if there is none."""
    problem = limit_graphs(hosted, problem)
    profile = hosted if problem.constraints.experts == "host" else profile
    for workload in with_chunks(problem.workload):
        part = replace(problem, workload=workload)
        optimum = HostSearch(profile, hosted, part, host, has_room).find()
        if optimum is not None:
            return replace(_make_host_plan(*optimum, part), request=problem.request)
    return None


def _train_with_host(hosted: Profile, problem: PlanProblem, host: Device) -> Plan | None:
    """Return a plan for training with all experts in host memory, where they are frozen."""
    if hosted.expert_bytes > host.budget_bytes:
        return None
    workload = replace(problem.workload, host_experts=hosted.host_experts)
    plan = _place_by_preference(hosted, replace(problem, workload=workload))
    if isinstance(plan, NoPlacement):
        return None
    forecast = replace(plan.forecast, expert_bytes=hosted.expert_bytes)
    reason = Reason("trained-beside", {"size": format_bytes(hosted.expert_bytes)})
    return replace(plan, forecast=forecast, request=problem.request, why=(reason, *plan.why))


def _make_host_plan(costs: Costs, stages: Stages, seconds: float, problem: PlanProblem) -> Plan:
    """Make the plan of stages with experts in host memory."""
    solution = Solution(
        stages=stages,
        objective="latency",
        value=seconds,
        bound=seconds,
        binding_device=max(stages, key=lambda stage: stage.stop - stage.start).device,
    )
    peaks = [stage for stage in _stage_peaks(costs, solution, problem.fleet) if stage is not None]
    plan = _make_plan(costs, solution, peaks, replace(problem, workload=costs.workload))
    forecast = replace(plan.forecast, expert_bytes=costs.profile.expert_bytes)
    seconds_of = None if forecast.seconds is None else forecast.seconds.token_seconds
    reasons = host_reason(costs), *faster_reasons(costs, problem.fleet, seconds_of)
    plan = replace(plan, forecast=forecast, why=(*reasons, *plan.why))
    if forecast.seconds is not None:
        return plan
    headroom = float(min(stage.headroom_bytes for stage in forecast.devices))
    return replace(plan, objective="headroom", value=headroom, bound=headroom)


def without_cpu(fleet: Fleet) -> Fleet:
    """Return the fleet without the CPU; unchanged if it has no other device."""
    gpus = [name for name in fleet.names if name != "cpu"]
    return fleet.only(gpus) if gpus else fleet


def _place_by_preference(
    profile: Profile, problem: PlanProblem, *, leave_room: bool = True
) -> Plan | NoPlacement:
    """Return the plan of the first group of `room.preferences` that has one."""
    # The groups: large chunks with the recommended free memory, small chunks with it, all chunks
    # without it. Within a group, fewer devices are preferred to larger chunks.
    chunked = _chunked_costs(profile, problem)
    *with_room, without_room = preferences(chunked) if leave_room else (chunked,)
    for roomy_costs in with_room:
        with suppress(UsageError):  # pins may exclude the additional devices that are needed
            plan = _place_on_fewest(roomy_costs, problem)
            if isinstance(plan, Plan):
                return plan
    return _place_on_fewest(without_room, problem)


def _place_on_fewest(chunked: Sequence[Costs], problem: PlanProblem) -> Plan | NoPlacement:
    """Return the plan with the fewest devices and, for that number, with the largest chunk."""
    shortage = NoPlacement()
    memories: list[KnownBytes] = []
    try:
        for limits in _limits_to_try(chunked, problem):
            # On demand: if nothing fits, `_limits_to_try` mostly raises before yielding.
            memories = memories or [KnownBytes(costs, problem.fleet) for costs in chunked]
            for costs, memory in zip(chunked, memories, strict=True):
                try:
                    return _search_plan(costs, problem, limits, memory)
                except NoPlacement as reason:
                    shortage |= reason
    except NoPlacement as reason:
        return reason  # lower bounds rule out any number of devices
    return shortage


def _limits_to_try(chunked: Sequence[Costs], problem: PlanProblem) -> Iterator[PlacementLimits]:
    """Yield the problem's limits with ascending numbers of devices, because fewer are preferred.

    With `use_all`, for pages, for a strategy and with a single chunk, the limits are yielded once
    and unchanged: `search.search` then decides the number.
    """
    wants_pages = chunked[0].page_bytes is not None and problem.objective in ("auto", "pages")
    is_free = not (problem.use_all or wants_pages) and problem.constraints.strategy == "auto"
    if not is_free or len(chunked) == 1:  # for pages the search itself compares all numbers
        yield problem.limits
        return
    max_devices = min(len(problem.fleet.devices), chunked[0].num_blocks)
    min_devices = search.min_devices(chunked, problem.fleet, limits=problem.limits)
    for number in range(min_devices, max_devices + 1):
        yield replace(problem.limits, num_devices=number)


def _search_plan(
    costs: Costs, problem: PlanProblem, limits: PlacementLimits, memory: KnownBytes | None
) -> Plan:
    """Return the plan of the optimum; raise NoPlacement if nothing fits."""
    # The search assumes that tensors go straight from stage to stage. If tied modules return to an
    # earlier device, stages hold further copies of tensors, which depend on the placement: the
    # optimum is replayed with these copies. `costs` records a stage that no longer fits as one that
    # doesn't fit, and the search runs again without the stage.
    while True:
        solution = search.search(
            costs,
            problem.fleet,
            objective=problem.objective,
            use_all=problem.use_all,
            strategy=problem.constraints.strategy,
            limits=limits,
            memory=memory,
        )
        memory = None  # outdated: the copies may rule out a stage whose bytes it holds as exact
        peaks = [*_stage_peaks(costs, solution, problem.fleet)]
        fitting = [stage for stage in peaks if stage is not None]
        if len(fitting) == len(peaks):
            return _make_plan(costs, solution, fitting, problem)


def _stage_peaks(costs: Costs, solution: Solution, fleet: Fleet) -> Iterator[StageBytes | None]:
    """Yield the peak bytes of each stage; None if copies on third devices exceed the budget."""
    device_of = _devices_of_blocks(costs, solution, fleet)
    for number, stage in enumerate(solution.stages):
        budget = fleet.devices[stage.device].budget_bytes
        if costs.has_returns:
            yield costs.stage_bytes_where(stage.start, stage.stop, budget, device_of)
        else:
            place = len(solution.stages) - number
            yield costs.stage_bytes(stage.start, stage.stop, budget, place=place)


def with_chunks(workload: Workload) -> Iterator[Workload]:
    """Yield the workload with each prefill chunk to try, the largest first; None is a single pass.

    A given chunk is the only one. An "auto" image batch becomes a single pass for all images.
    """
    if workload.images and workload.vision_batch == "auto":
        workload = replace(workload, vision_batch=None)
    sizes: list[int | None] = [None]
    if workload.prefill_chunk_tokens != "auto":
        sizes = [workload.prefill_chunk_tokens]
    elif workload.is_paged:
        sizes = [min(tokens, workload.context_tokens) for tokens in _STEP_TOKENS]
    elif workload.training is None and not workload.images:
        # Training runs whole sequences. With images, each chunk needs a trace of its own.
        sizes += [tokens for tokens in _CHUNK_TOKENS if tokens < workload.prompt_tokens]
    for tokens in dict.fromkeys(sizes):
        yield replace(workload, prefill_chunk_tokens=tokens)


def _devices_of_blocks(costs: Costs, solution: Solution, fleet: Fleet) -> list[str]:
    """Return the name of the device of every block, in the profile's order."""
    devices: dict[int, str] = {}
    for stage in solution.stages:
        name = fleet.devices[stage.device].name
        devices.update(dict.fromkeys(costs.blocks_of(stage.start, stage.stop), name))
    return [devices[index] for index in range(len(costs.profile.blocks))]


def _make_plan(
    costs: Costs, solution: Solution, peaks: Sequence[StageBytes], problem: PlanProblem
) -> Plan:
    """Make the plan of a solution, given the peak bytes of its stages."""
    profile, fleet = costs.profile, problem.fleet
    device_of = _devices_of_blocks(costs, solution, fleet)
    runs = [(fleet.names[stage.device], stage.start, stage.stop) for stage in solution.stages]
    forecasts = tuple(
        stage_bytes.place_on(fleet.device(name))
        for (name, _, _), stage_bytes in zip(runs, peaks, strict=True)
    )
    entries = tuple(
        (module, device_of[index])
        for index, block in enumerate(profile.blocks)
        for module in block.modules
    )
    copy_seconds = _copy_seconds(costs, solution, fleet)
    reasons = _reasons(costs, solution, problem, copy_seconds)
    plan = Plan(
        source="",
        model=profile.model,
        fingerprint=profile.fingerprint,
        fleet=fleet,
        workload=costs.workload,
        placement=Placement(entries=entries, fingerprint=profile.fingerprint),
        forecast=Forecast(
            devices=forecasts,
            seconds=costs.latency.seconds_of(runs, fleet),
            host_bytes=costs.streamed_bytes(0, costs.num_blocks),
            copy_seconds=copy_seconds,
        ),
        objective=solution.objective,
        value=float(solution.value),
        bound=float(solution.bound),
        binding_device=fleet.devices[solution.binding_device].name,
        request=problem.request,
        why=(*reasons, *room_reasons(forecasts, chosen=True)),
        offloaded=profile.offloaded,
        needs_movers=profile.needs_movers,
    )
    if not costs.workload.is_paged:
        return plan
    return fill(plan, costs, runs, device_of if costs.has_returns else None)


def _copy_seconds(costs: Costs, solution: Solution, fleet: Fleet) -> float | None:
    """Return the seconds to copy offloaded weights in each step.

    None if nothing is offloaded, or if the host's link to a device has an unknown speed.
    """
    copies = [
        (costs.streamed_bytes(stage.start, stage.stop), fleet.devices[stage.device])
        for stage in solution.stages
    ]
    rates = [(size, device.host_bytes_per_second) for size, device in copies if size]
    if not all(rate for _, rate in rates):
        return None
    return sum(size / rate for size, rate in rates if rate) or None


def _reasons(
    costs: Costs, solution: Solution, problem: PlanProblem, copy_seconds: float | None
) -> Iterator[Reason]:
    """Yield the reasons for a solution, except for low free memory (`room_reasons`)."""
    used = [problem.fleet.names[stage.device] for stage in solution.stages]
    num_used, num_devices = len(used), len(problem.fleet.devices)
    wants_few = problem.constraints.strategy == "auto" and not problem.use_all
    if wants_few and solution.objective != "pages":
        is_tight = num_used > 1 and costs.room is not None
        is_tight = is_tight and _may_fit_on_fewer(problem, costs, num_used)
        is_limited = bool(problem.limits)
        yield from gpus_reason(
            num_used, num_devices, used[0], is_limited=is_limited, lack_room=is_tight
        )
    reserved = reserves(problem.constraints, problem.fleet)
    yield from demand_reasons(problem.constraints, problem.fleet, reserved, used)
    if costs.has_ties and num_used > 1:
        yield Reason("tied")
    yield from (Reason("note", {"text": note}) for note in costs.profile.notes)
    if problem.constraints.offload:
        num_bytes = costs.streamed_bytes(0, costs.num_blocks)
        yield offload_reason(len(costs.profile.offloaded), num_bytes, copy_seconds)
    yield from chunk_reason(problem.workload, costs.workload)


def _may_fit_on_fewer(problem: PlanProblem, costs: Costs, num_used: int) -> bool:
    """Return True unless lower bounds rule out one device less, even without free memory."""
    return search.is_conceivable(
        _chunked_costs(costs.profile, problem),
        problem.fleet,
        limits=replace(problem.limits, num_devices=num_used - 1),
    )


def _describe_shortage(
    profile: Profile, problem: PlanProblem, shortage: NoPlacement
) -> InfeasibleError:
    """Return the error for a problem without a plan, with a lower bound of the missing bytes."""
    workload, missing_bytes = problem.workload, shortage.shortfall_bytes()
    # A lower bound, which can be almost 0 if the bytes fit and only no cut does.
    is_reported = missing_bytes >= _LEAST_REPORTED_BYTES
    shortfall = f"; at least {format_bytes(missing_bytes)} are missing" if is_reported else ""
    return InfeasibleError(
        f"{profile.model} does not fit: {format_bytes(profile.weight_bytes)} of weights, "
        f"{workload.context_tokens} tokens, batch {workload.batch}; "
        f"{format_count(len(problem.fleet.devices), 'device')} with a budget of "
        f"{format_bytes(problem.fleet.budget_bytes)} in all{shortfall}",
        hint="use more or larger GPUs, or a smaller model",
        shortfall_bytes=missing_bytes,
    )

"""Explain a plan from its profile: boundaries, and the shortfall on fewer devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from duoka.errors import UsageError
from duoka.forecast.costs import Costs
from duoka.forecast.profile import Profile
from duoka.hardware.fleet import Fleet

from ..from_device_map import OBJECTIVE as GIVEN
from ..limits import limits_for
from ..placement import runs_of
from ..plan import Plan
from ..plan_profile import needed_profile
from ..planner import with_chunks
from ..room import is_large_chunk, is_tight, room_bytes
from ..search import BlockRange, NoPlacement, search
from .data import BoundaryMove, Explanation, Fewer, Outcome, Share
from .trial import Stages, Trial


def explain(plan: Plan, profile: Profile | None = None) -> Explanation:
    """Explain a plan: its binding device, and the boundaries of its stages.

    Parameters
    ----------
    plan : Plan
        A plan of a checkpoint, without a paged KV cache.
    profile : Profile, optional
        Profile of the plan's model; by default the one in the cache.

    Raises
    ------
    UsageError
        If the cache has no profile of the model.
    FormatError
        If the profile is of another model, or the plan lacks modules of the model.

    Examples
    --------
    >>> explanation = explain(plan)  # doctest: +SKIP
    >>> explanation.changes[0].outcome  # doctest: +SKIP
    'impossible'
    """
    if plan.workload.is_paged:
        raise UsageError(
            "plans for a paged KV cache can't be explained",
            hint="explain a plan without --serve for the same number of requests: --batch N",
        )
    profile = profile or needed_profile(plan, "to explain the plan with")
    plan.refuse_other(profile.fingerprint, plan.source or profile.model)
    if plan.offloaded:
        streams = [
            index
            for index, block in enumerate(profile.blocks)
            if set(block.modules) & set(plan.offloaded)
        ]
        profile = profile.offloading(streams)
    # The trial has the costs and the recommended free memory of the search, so its numbers are
    # comparable with the plan's. A device map may use a device in two separate runs of blocks; such
    # a plan has no stages in the sense of the search (one per device), and no boundary is moved.
    costs = Costs(profile, plan.workload)
    limits = limits_for(plan.request.constraints, profile, plan.fleet)
    leaves_room = plan.objective != GIVEN and not any(map(is_tight, plan.forecast.devices))
    trial = Trial(costs, plan.fleet, plan.objective, limits, leaves_room=leaves_room)
    runs = tuple(
        BlockRange(start=start, stop=stop, device=plan.fleet.names.index(name))
        for name, start, stop in runs_of(plan.placement.devices_of(profile), costs.chain)
    )
    stages = runs if len({stage.device for stage in runs}) == len(runs) else None
    return Explanation(
        work="request" if plan.workload.training is None else "step",
        objective=plan.objective,
        value=plan.value,
        bound=plan.bound,
        leaves_room=leaves_room,
        binding_device=plan.binding_device,
        shares=tuple(_shares(plan)),
        changes=() if stages is None else tuple(_boundary_moves(trial, stages)),
        fewer=_shortfall_on_fewer(trial, plan),
    )


def _shares(plan: Plan) -> Iterator[Share]:
    """Yield the share of each device in use, with the bytes of the plan's forecast."""
    for device in plan.forecast.devices:
        yield Share(
            device=device.device,
            modules=tuple(name for name, at in plan.placement.entries if at == device.device),
            requested_bytes=device.requested_bytes,
            budget_bytes=device.budget_bytes,
        )


def _boundary_moves(trial: Trial, stages: Stages) -> Iterator[BoundaryMove]:
    """Yield the effect of moving each boundary by one block, in either direction."""
    # Example: stages [0, 3) and [3, 6), so the boundary is at 3. A cut at 2 moves block 2 from the
    # first to the second stage (giver: the first); a cut at 4 moves block 3 from the second to the
    # first (giver: the second). Only these two shares change, but the value is of the whole
    # placement: if a third stage has the least headroom, both moves are "equal".
    current = trial.value(stages)
    for number in range(len(stages) - 1):
        source, target = stages[number : number + 2]
        for cut in (target.start - 1, target.start + 1):
            if not source.start < cut < target.stop:
                continue  # the stage would be empty
            changed_pair = (replace(source, stop=cut), replace(target, start=cut))
            changed = (*stages[:number], *changed_pair, *stages[number + 2 :])
            shares = trial.shares(changed)[number : number + 2]
            giver, taker = shares if cut < target.start else shares[::-1]
            value = trial.value(changed)
            yield BoundaryMove(
                giver=giver,
                taker=taker,
                modules=trial.modules(min(cut, target.start), max(cut, target.start)),
                outcome=_outcome(trial, value, current, shares)
                if trial.allows(changed_pair)
                else "forbidden",
                value=value,
            )


def _outcome(
    trial: Trial, value: float | None, current: float | None, shares: Sequence[Share]
) -> Outcome:
    """Compare a changed placement of `value` with the plan of `current`; None doesn't fit."""
    if value is None:
        return "tight" if all(share.headroom_bytes >= 0 for share in shares) else "impossible"
    if current is None or trial.is_better(value, current):
        return "better"
    return "worse" if trial.is_better(current, value) else "equal"


def _shortfall_on_fewer(trial: Trial, plan: Plan) -> Fewer | None:
    """Return a lower bound of the missing bytes on one device less than the plan uses.

    None if the plan uses one device, if the request sets the devices, or if a search finds a
    placement on fewer devices.
    """
    num = len(plan.devices) - 1
    if num < 1 or plan.request.use_all or plan.request.constraints.demands:
        return None
    largest = sorted(trial.fleet.devices, key=lambda device: -device.budget_bytes)[:num]
    # The smallest chunk needs the least memory, and the largest devices hold the most, so the
    # shortfall of this one search is a lower bound for all placements on so few devices.
    workloads = [plan.workload]
    if not plan.workload.images:
        chunk = plan.request.workload.prefill_chunk_tokens
        workloads = [*with_chunks(replace(plan.workload, prefill_chunk_tokens=chunk))]
    if trial.leaves_room and is_large_chunk(plan.workload):
        workloads = [*filter(is_large_chunk, workloads)] or workloads
    costs = Costs(trial.costs.profile, workloads[-1])
    costs = costs.leaving(room_bytes) if trial.leaves_room else costs
    try:
        search(costs, Fleet(devices=tuple(largest)))
    except NoPlacement as none:
        names = tuple(device.name for device in largest)
        return Fewer(devices=names, missing_bytes=none.shortfall_bytes())
    return None  # a device map may use more devices than needed

"""Page count: how many pages of a cache a placement has room for, and how fast it answers then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from duoka.forecast.costs import Costs
from duoka.forecast.profile import Profile
from duoka.forecast.replay_serving import ServingReplay
from duoka.forecast.serving import least_pages
from duoka.forecast.serving_speed import serving_speeds, step_seconds
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import Workload

from .plan import Plan

Stage = tuple[Sequence[int], int]
"""The blocks of a stage, and the budget of its device."""


def fill(
    plan: Plan,
    costs: Costs,
    runs: Sequence[tuple[str, int, int]],
    device_of: Sequence[str] | None = None,
) -> Plan:
    """A plan over a paged cache with as many pages as fit, if nobody says how many, and its speeds.

    `runs` are its stages: the device, and from which place of the chain to which; a device that a
    person gave several of them takes them together.
    """
    workload, fleet = costs.workload, plan.fleet
    if workload.pages is None:
        blocks: dict[str, list[int]] = {name: [] for name in plan.devices}
        for name, start, stop in runs:
            blocks[name] += costs.blocks_of(start, stop)
        stages = [(sorted(blocks[name]), fleet.device(name).budget_bytes) for name in plan.devices]
        workload, peaks = with_pages(costs.profile, workload, stages, costs.usable_bytes, device_of)
        devices = tuple(
            stage.placed(fleet.device(name))
            for stage, name in zip(peaks, plan.devices, strict=True)
        )
        plan = replace(plan, workload=workload, forecast=replace(plan.forecast, devices=devices))
        assert workload.pages is not None, "they were counted"
        if plan.objective == "pages":
            bound = plan.bound + least_pages(workload)
            plan = replace(plan, value=float(workload.pages), bound=bound)
    stages_at = costs.profile, workload, costs.places, runs, fleet
    forecast = replace(
        plan.forecast,
        serving_speeds=tuple(serving_speeds(*stages_at)),
        step_seconds=step_seconds(*stages_at),
    )
    return replace(plan, forecast=forecast)


def with_pages(
    profile: Profile,
    workload: Workload,
    stages: Sequence[Stage],
    usable_bytes: Callable[[int], int],
    device_of: Sequence[str] | None = None,
) -> tuple[Workload, list[StageBytes]]:
    """The workload with as many pages as all stages have room for, and what the stages take then.

    Sizes in segments make it a few less at times than the last one that would fit.
    """

    def peaks_of(pages: int) -> list[StageBytes]:
        replay = ServingReplay(profile, replace(workload, pages=pages))
        peaks = [replay.run(blocks, device_of=device_of) for blocks, _ in stages]
        return [stage for stage in peaks if stage is not None]  # nothing limits them

    def most(pages: int, peaks: Sequence[StageBytes]) -> int:
        """The pages that there would be, if each took what it takes in the caches of these."""
        return min(
            (
                pages + (usable_bytes(budget) - stage.reserved_bytes) // size
                for (_, budget), stage in zip(stages, peaks, strict=True)
                if (size := stage.kv_cache_bytes // (pages + 1))
            ),
            default=pages,
        )

    pages = least_pages(workload)
    best = peaks_of(pages)
    for _ in range(_MOST_ROUNDS):
        more = most(pages, best)
        if more <= pages:
            break
        # Sizes in segments make the next ones dearer than that, or cheaper.
        peaks = peaks_of(more)
        while (fewer := most(more, peaks)) < more:
            more = max(fewer, pages)
            peaks = peaks_of(more)
        if more == pages:
            break
        pages, best = more, peaks
    return replace(workload, pages=pages), best


_MOST_ROUNDS = 4

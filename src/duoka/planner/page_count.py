"""Page count: the number of pages of a paged KV cache that fit a placement, and its speeds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from duoka.forecast.allocator import LARGE_REQUEST_BYTES, rounded_bytes, segment_bytes
from duoka.forecast.costs import Costs
from duoka.forecast.profile import Profile
from duoka.forecast.replay_serving import ServingReplay
from duoka.forecast.serving import SERVING_MONOMIALS, least_pages
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
    """Set the largest number of pages that fits a plan, unless it is given, and the plan's speeds.

    `runs` are the plan's stages as (device, start, stop) in the chain. With a device map, a device
    may have several runs, which are counted together. `device_of` has the device of every block, if
    copies of tensors on third devices count.
    """
    workload, fleet = costs.workload, plan.fleet
    if workload.pages is None:
        blocks: dict[str, list[int]] = {name: [] for name in plan.devices}
        for name, start, stop in runs:
            blocks[name] += costs.blocks_of(start, stop)
        stages = [(sorted(blocks[name]), fleet.device(name).budget_bytes) for name in plan.devices]
        workload, peaks = with_pages(costs.profile, workload, stages, costs.usable_bytes, device_of)
        devices = tuple(
            stage.place_on(fleet.device(name))
            for stage, name in zip(peaks, plan.devices, strict=True)
        )
        plan = replace(plan, workload=workload, forecast=replace(plan.forecast, devices=devices))
        assert workload.pages is not None, "they were counted"
        if plan.objective == "pages":
            bound = plan.bound + least_pages(workload)
            plan = replace(plan, value=float(workload.pages), bound=bound)
    stages_at = costs.profile, workload, costs.places, runs, fleet, costs.host
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
    """Return the workload with the largest number of pages that fits all stages, and their peaks.

    The reserved bytes may fall as pages are added: tensors of 5 to 10 MiB leave a part of their
    20 MiB segments unused, and larger tensors have segments of their own size. So bisection over
    all counts would be wrong. It is used within ranges of counts in which segments have the same
    size, from the range of the largest counts down.
    """

    # State: the largest count not ruled out yet (`max_pages`). `segments` is constant on a run of
    # counts whose tensors are in segments of the same size. Within a run the reserved bytes grow
    # with the count, so bisection finds the largest count that fits. From run to run they may fall,
    # so runs are searched from above: the first run whose least count fits has the answer. Example
    # of a fall: five tensors of 7 MiB need three segments of 20 MiB (60 MiB), five of 10 MiB need
    # segments of their own size (50 MiB).
    @cache
    def peaks_at(pages: int) -> list[StageBytes]:
        replay = ServingReplay(profile, replace(workload, pages=pages))
        peaks = [replay.run(blocks, device_of=device_of) for blocks, _ in stages]
        return [stage for stage in peaks if stage is not None]  # never None without a limit

    def exceeds(pages: int) -> bool:
        return any(
            stage.reserved_bytes > usable_bytes(budget)
            for (_, budget), stage in zip(stages, peaks_at(pages), strict=True)
        )

    min_pages = least_pages(workload)
    tensors = [_page_tensor_bytes(profile, workload, blocks) for blocks, _ in stages]
    sizes = sorted({size for stage in tensors for size in stage})

    def segments(pages: int) -> list[tuple[bool, int, int]]:
        if workload.gpu_generation.expandable_segments:
            return []  # tensors lie side by side in one segment: a single run of counts
        return [_segment_kind(size + growth * (pages - min_pages)) for size, growth in sizes]

    max_pages = min(
        (
            min_pages + max(0, usable_bytes(budget) - peak.requested_bytes) // sum(growth) + 1
            for (_, budget), peak, stage in zip(stages, peaks_at(min_pages), tensors, strict=True)
            if (growth := [growth_bytes for _, growth_bytes in stage])
        ),
        default=min_pages,
    )
    while max_pages > min_pages:
        start = bisect_left(range(max_pages), segments(max_pages), lo=min_pages + 1, key=segments)
        if not exceeds(start):
            max_pages = bisect_left(range(max_pages + 1), True, lo=start + 1, key=exceeds) - 1
            break
        max_pages = start - 1
    return replace(workload, pages=max_pages), peaks_at(max_pages)


def _segment_kind(num_bytes: int) -> tuple[bool, int, int]:
    """Return a key of the segment that a tensor lies in, and of the tensors that fit; ascending."""
    # A request of less than 10 MiB shares a segment of 20 MiB, one of 10 MiB has 10 MiB to itself:
    # the size of the segment alone would fall there, so the kind of request comes first.
    size = rounded_bytes(num_bytes)
    segment = segment_bytes(size)
    return size >= LARGE_REQUEST_BYTES, segment, -(segment // size)


def _page_tensor_bytes(
    profile: Profile, workload: Workload, blocks: Sequence[int]
) -> list[tuple[int, int]]:
    """Return (bytes with the fewest pages, bytes per further page) of each tensor of pages."""
    replay = ServingReplay(profile, replace(workload, pages=least_pages(workload)), brief=True)
    place = SERVING_MONOMIALS.index("g")
    return [
        (replay.sizes(block, 0)[number], round(rule[place]))
        for block in blocks
        for trace in [replay.trace(block, 0)]
        for number in trace.retained
        if len(rule := trace.sizes[number]) > place and round(rule[place])
    ]

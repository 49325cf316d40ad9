"""Page count: how many pages of a cache a placement has room for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from duoka.forecast.profile import Profile
from duoka.forecast.replay_serving import ServingReplay
from duoka.forecast.serving import least_pages
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import Workload

Stage = tuple[Sequence[int], int]
"""The blocks of a stage, and the budget of its device."""


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

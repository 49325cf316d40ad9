"""Room: the memory to leave free on each device, and the order of preference.

A forecast is for what a process does itself. Others may take memory, too, and a prompt in small
chunks is slow; so a plan leaves room and takes large chunks where it can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from duoka.base.units import MIB
from duoka.forecast.costs import Costs
from duoka.forecast.forecast import Forecast
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import Workload

LEAST_CHUNK_TOKENS = 2048
_SHARE_PERCENT = 3
_LEAST_BYTES = 512 * MIB
_LARGEST_PART = 8


def room_bytes(budget_bytes: int) -> int:
    """Return the bytes of a budget to leave free beside reserved ones.

    It is the larger of 3 % and 512 MiB, and of a budget below 4 GiB an eighth.
    """
    floor_bytes = min(_LEAST_BYTES, budget_bytes // _LARGEST_PART)
    return max(budget_bytes * _SHARE_PERCENT // 100, floor_bytes)


def is_tight(stage: StageBytes) -> bool:
    """Return True if a stage leaves less than `room_bytes` of its device."""
    return stage.free_bytes < room_bytes(stage.budget_bytes)


def cache_tokens(forecast: Forecast, workload: Workload) -> int:
    """Estimate the tokens of the KV cache with all free memory but the room.

    At least those that were planned for; 0 where there is no cache.
    """
    grown = [
        1 + max(stage.free_bytes - room_bytes(stage.budget_bytes), 0) / stage.kv_cache_bytes
        for stage in forecast.devices
        if stage.kv_cache_bytes > 0
    ]
    return int(min(grown, default=0) * workload.batch * workload.context_tokens)


def preferences(chunked: Sequence[Costs]) -> Iterator[list[Costs]]:
    """Yield the costs of all chunks in the order of preference.

    Large chunks with room; small chunks with room; whatever fits.
    """
    roomy = [costs.leaving(room_bytes) for costs in chunked]
    large = [costs for costs in roomy if is_large_chunk(costs.workload)]
    small = [costs for costs in roomy if not is_large_chunk(costs.workload)]
    yield from filter(None, (large, small, list(chunked)))


def is_large_chunk(workload: Workload) -> bool:
    """Return True if a prompt runs whole, or in chunks large enough for a GPU."""
    chunk = workload.prefill_chunk_tokens
    return not isinstance(chunk, int) or chunk >= LEAST_CHUNK_TOKENS

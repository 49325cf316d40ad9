"""Room: the recommended free memory of each device, and the preference among prefill chunks.

A forecast counts the memory of duoka's own process. Other processes may take memory, too, and
prefill in small chunks is slow. So the planner prefers plans that leave the recommended memory free
("room") on every device and run prefill in large chunks.
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
    """Return the recommended free memory: bytes of a budget that the allocator doesn't reserve.

    That is 3 % of the budget, but at least 512 MiB or, if less, an eighth of the budget.
    """
    floor_bytes = min(_LEAST_BYTES, budget_bytes // _LARGEST_PART)
    return max(budget_bytes * _SHARE_PERCENT // 100, floor_bytes)


def is_tight(stage: StageBytes) -> bool:
    """Return True if a stage leaves less than `room_bytes` of its device's budget free."""
    return stage.free_bytes < room_bytes(stage.budget_bytes)


def cache_tokens(forecast: Forecast, workload: Workload) -> int:
    """Estimate the tokens that a KV cache in all but the recommended free memory would hold.

    The estimate is at least the planned number of tokens; 0 if the model has no KV cache.
    """
    grown = [
        1 + max(stage.free_bytes - room_bytes(stage.budget_bytes), 0) / stage.kv_cache_bytes
        for stage in forecast.devices
        if stage.kv_cache_bytes > 0
    ]
    return int(min(grown, default=0) * workload.batch * workload.context_tokens)


def preferences(chunked: Sequence[Costs]) -> Iterator[list[Costs]]:
    """Yield groups of costs to search, the preferred group first.

    The groups are large chunks with the recommended free memory, small chunks with it, and all
    chunks without it. `chunked` has the costs of each prefill chunk.
    """
    roomy = [costs.leaving(room_bytes) for costs in chunked]
    large = [costs for costs in roomy if is_large_chunk(costs.workload)]
    small = [costs for costs in roomy if not is_large_chunk(costs.workload)]
    yield from filter(None, (large, small, list(chunked)))


def is_large_chunk(workload: Workload) -> bool:
    """Return True if prefill runs in a single pass, or in chunks large enough to use a GPU well."""
    chunk = workload.prefill_chunk_tokens
    return not isinstance(chunk, int) or chunk >= LEAST_CHUNK_TOKENS

"""Render the capacity of a plan for concurrent requests: pages, requests, throughput."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from duoka.base.units import format_count, format_roughly
from duoka.forecast.serving_speed import ServingSpeed
from duoka.planner.plan import Plan
from duoka.planner.room import room_bytes

_LENGTH_DIVISORS = (1, 4, 16)


def render_serving(plan: Plan) -> Iterator[Text]:
    """Yield lines on the number of pages, the number of requests, and the throughput."""
    pages = plan.workload.pages
    assert pages is not None, "a plan's workload is resolved"
    size = plan.workload.page_tokens
    tokens = pages * size
    text = f"{pages:,} pages of {size} tokens, {tokens:,} in total"
    if plan.workload.pages_for_batch:
        yield Text(text)
    else:
        yield Text(f"{text}: {_by_stage(plan)}")
        yield Text(f"at once {_requests_by_length(plan, pages)}")
    yield from (Text(line) for line in _describe_throughput(plan))


def _by_stage(plan: Plan) -> str:
    """List the pages that each stage could hold; the plan uses the minimum."""
    pages = plan.workload.pages or 0
    parts = []
    for stage in plan.forecast.devices:
        size = stage.kv_cache_bytes // (pages + 1)
        if size:
            free_bytes = stage.free_bytes - room_bytes(stage.budget_bytes)
            parts.append(f"{stage.device} holds {pages + max(free_bytes, 0) // size:,}")
    return ", ".join(parts)


def _requests_by_length(plan: Plan, pages: int) -> str:
    """List how many requests fit with the whole context, and with shorter lengths."""
    workload = plan.workload
    lengths = dict.fromkeys(max(workload.context_tokens // part, 1) for part in _LENGTH_DIVISORS)
    parts = []
    for length in lengths:
        number = pages // -(-length // workload.page_tokens)
        limit = f" (of {number:,} that fit)" if number > workload.batch else ""
        parts.append(
            f"{format_count(min(number, workload.batch), 'request')} of {length:,} tokens{limit}"
        )
    return ", ".join(parts)


def _describe_throughput(plan: Plan) -> Iterator[str]:
    """Describe the estimated throughput, and the effect of several stages on it."""
    loads, num = plan.forecast.serving_speeds, len(plan.devices)
    if not loads:
        return
    speeds = ", ".join(
        f"{load.requests}: {format_roughly(load.best_tokens_per_second)}" for load in loads
    )
    yield f"estimated tokens/s by number of concurrent requests (each at half its length): {speeds}"
    single = loads[0]
    if num == 1 or single.requests != 1:
        return
    if not plan.host_experts:
        yield (
            f"one request alone gets {format_roughly(single.best_tokens_per_second)} tokens/s; "
            f"more GPUs don't make it faster, because each token passes through the {num} GPUs in "
            "turn"
        )
    ungrouped = [load for load in loads if not load.is_grouped]
    if (largest := loads[-1]).is_grouped:
        yield (
            f"{largest.requests} in {min(num, largest.requests)} groups, each on another GPU, "
            f"reach {_gain(largest):.2f} times the speed of a single group"
        )
    if ungrouped:
        lowest = min(ungrouped, key=_gain)
        yield (
            f"{', '.join(str(load.requests) for load in ungrouped)} concurrent requests stay in "
            f"one group: {lowest.requests} in {min(num, lowest.requests)} groups would get "
            f"{_gain(lowest):.2f} times that speed, because each group passes the slowest GPU "
            "separately"
        )


def _gain(load: ServingSpeed) -> float:
    """Return the speed of several groups of requests relative to a single group."""
    return load.tokens_per_second / load.serial_tokens_per_second

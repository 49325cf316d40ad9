"""What a plan for many requests is good for, in sentences: pages, requests, tokens a second."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from duoka.base.units import format_count, format_roughly
from duoka.forecast.serving import PAGE_TOKENS
from duoka.forecast.serving_speed import ServingSpeed
from duoka.planner.plan import Plan
from duoka.planner.room import room_bytes

_SHORTER = (1, 4, 16)


def render_serving(plan: Plan) -> Iterator[Text]:
    """Yield how many pages there are, for how many requests, and how fast these are answered."""
    pages = plan.workload.pages
    assert pages is not None, "a plan's workload is resolved"
    tokens = pages * PAGE_TOKENS
    yield Text(f"{pages:,} pages of {PAGE_TOKENS} tokens, {tokens:,} in all: {_by_stage(plan)}")
    yield Text(f"at once {_requests(plan, pages)}")
    yield from (Text(line) for line in _loads(plan))


def _by_stage(plan: Plan) -> str:
    """How many pages each stage would have room for; the least is what there is."""
    pages = plan.workload.pages or 0
    parts = []
    for stage in plan.forecast.devices:
        size = stage.kv_cache_bytes // (pages + 1)
        if size:
            left = stage.free_bytes - room_bytes(stage.budget_bytes)
            parts.append(f"{stage.device} holds {pages + max(left, 0) // size:,}")
    return ", ".join(parts)


def _requests(plan: Plan, pages: int) -> str:
    """How many requests of some lengths fit."""
    workload = plan.workload
    lengths = dict.fromkeys(max(workload.context_tokens // part, 1) for part in _SHORTER)
    parts = []
    for length in lengths:
        number = pages // -(-length // PAGE_TOKENS)
        limit = f" (of {number:,} that fit)" if number > workload.batch else ""
        parts.append(
            f"{format_count(min(number, workload.batch), 'request')} of {length:,} tokens{limit}"
        )
    return ", ".join(parts)


def _loads(plan: Plan) -> Iterator[str]:
    """How fast they are answered, by formula, and what several stages do for that."""
    loads, num = plan.forecast.serving_speeds, len(plan.devices)
    if not loads:
        return
    speeds = ", ".join(
        f"{load.requests}: {format_roughly(load.best_tokens_per_second)}" for load in loads
    )
    yield f"tokens/s by formula, each request at half its length, by how many there are: {speeds}"
    one = loads[0]
    if num == 1 or one.requests != 1:
        return
    yield (
        f"one request alone gets {format_roughly(one.best_tokens_per_second)} tokens/s, and {num} "
        "GPUs don't make it faster: each of its tokens passes them one after another"
    )
    together = [load for load in loads if not load.is_grouped]
    if (most := loads[-1]).is_grouped:
        yield (
            f"{most.requests} in {min(num, most.requests)} groups, each on another GPU, get "
            f"{_gain(most):.2f} times what they would get together, one GPU after another"
        )
    if together:
        least = min(together, key=_gain)
        yield (
            f"{', '.join(str(load.requests) for load in together)} at once stay in one group, one "
            f"GPU after another: {least.requests} in {min(num, least.requests)} groups would get "
            f"{_gain(least):.2f} times that, since each group comes to the slowest GPU by itself"
        )


def _gain(load: ServingSpeed) -> float:
    return load.tokens_per_second / load.serial_tokens_per_second

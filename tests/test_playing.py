"""Playing against the oracle: every request one after the other, on a plain allocator."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duoka.allocator import CachingAllocator, OutOfCapacity
from duoka.playing import KEEP, MALLOC, RELEASE, Held, Memo, Part, Player
from duoka.profile import Key, Profile
from duoka.replay import Replay
from duoka.workload import Workload

from . import tiny
from .replaying import Peaks, PlainAllocator, plain_run
from .tiny import MIB

MADE_UP = [
    tiny.made_up([3 * MIB, MIB, MIB, MIB, 2 * MIB], tiny.Costs(cache=4096, work=9000)),
    tiny.made_up([3 * MIB, MIB, MIB, MIB, 0], tiny.Costs(cache=700), tied_to={4: 0}),
    tiny.made_up([100, 200, 200, 300, 300, 100], tiny.Costs(cache=100_000, result=70_000)),
]
workloads = st.builds(
    Workload,
    batch=st.sampled_from([1, 1, 3]),
    prompt_tokens=st.integers(1, 1500),
    new_tokens=st.sampled_from([1, 3, 30]),
    dtype=st.just("bfloat16"),
    prefill_chunk_tokens=st.sampled_from([None, 64, 300]),
)


def run(replay: Replay, blocks: list[int], capacity: int | None) -> Peaks | None:
    found = replay.run(blocks, capacity)
    if found is None:
        return None
    return found.allocated, found.reserved, found.requested, found.kv_cache, found.pressed


def check(profile: Profile, workload: Workload, data: st.DataObject) -> None:
    replay = Replay(profile, workload)
    for _ in range(3):
        all_blocks = range(len(profile.blocks))
        blocks = sorted(data.draw(st.sets(st.sampled_from(all_blocks), min_size=1)))
        if data.draw(st.booleans()):
            blocks = list(range(blocks[0], blocks[-1] + 1))
        free = run(replay, blocks, None)
        assert free is not None
        assert free == plain_run(replay, blocks, None)
        _, reserved, requested, *_ = free
        capacity = data.draw(st.integers(requested - 1, reserved + 4 * MIB))
        assert run(replay, blocks, capacity) == plain_run(replay, blocks, capacity)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(MADE_UP), workloads, st.data())
def test_stages_are_played_as_the_oracle_plays_them(
    profile: Profile, workload: Workload, data: st.DataObject
) -> None:
    check(profile, workload, data)


@pytest.mark.parametrize("name", ["llama", "tied"])
@settings(max_examples=2, deadline=None)
@given(workload=workloads, data=st.data())
def test_models_are_played_as_the_oracle_plays_them(
    name: str, workload: Workload, data: st.DataObject
) -> None:
    check(tiny.regular(name), workload, data)


@given(
    st.lists(
        st.one_of(st.integers(1, 3 * MIB), st.integers(1, 60 * MIB), st.integers(-50, -1)),
        max_size=60,
    ),
    st.one_of(st.none(), st.integers(MIB, 200 * MIB)),
)
def test_the_allocator_and_a_plain_one_give_the_same(
    steps: list[int], capacity: int | None
) -> None:
    allocator, plain = CachingAllocator(capacity), PlainAllocator(capacity)
    live: list[Any] = []
    for step in steps:
        if step > 0:
            try:
                live.append((allocator.malloc(step), plain.malloc(step)))
            except OutOfCapacity:
                with pytest.raises(MemoryError):
                    plain.malloc(step)
        elif live:
            one, other = live.pop(-step % len(live))
            allocator.free(one)
            plain.free(other)
        assert [one.size for one, _ in live] == [other.size for _, other in live]
        assert allocator.reserved_bytes == plain.reserved
        assert allocator.max_reserved_bytes == plain.most_reserved


def test_by_hand() -> None:
    """A small request, a large one, a cache; then the large one ends."""
    part = Part([(MALLOC, 0, 1000), (MALLOC, 1, 3 * MIB), (KEEP, 2, 600), (RELEASE, 0, 1)])
    player = Player(None, Memo())
    alive: dict[Key, Held] = {}
    kept = player.play(part, 7, alive, [])
    assert list(alive) == [(7, 0)]
    assert [size for _, size in kept] == [1024]
    assert player.allocated == player.requested == 2048
    assert player.peak == player.requested_peak == 2048 + 3 * MIB
    assert (player.cached, player.cached_at_peak) == (1024, 1024)
    assert player.allocator.reserved_bytes == 22 * MIB


def test_what_was_worked_out_once_is_looked_up() -> None:
    part = Part([(MALLOC, 0, 1000), (MALLOC, 1, 500), (RELEASE, 0, 1), (RELEASE, 0, 0)])
    memo = Memo()
    for _ in range(2):
        player = Player(None, memo)
        for block in range(5):
            assert player.play(part, block, {}, []) == []
        assert (player.allocated, player.peak) == (0, 1536)
        assert player.allocator.reserved_bytes == 2 * MIB
    # The first time a segment is needed, from then on there is one, wholly free.
    assert len(memo.outcomes) == 1

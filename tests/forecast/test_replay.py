"""The replay against reckoning by hand, and its short cuts against the long way."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import MIB

from duoka.forecast import replay
from duoka.forecast.allocator import LARGE_SEGMENT_BYTES
from duoka.forecast.profile import Profile
from duoka.forecast.replay import Replay
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import Workload

PLAIN = tiny.Costs(cache=0, result=1024, work=4096)
CACHED = tiny.Costs(cache=512, result=1024, work=4096)


def workload(prompt: int, new: int, *, batch: int = 1, chunk: int | None = None) -> Workload:
    return Workload(batch=batch, prompt_tokens=prompt, new_tokens=new, prefill_chunk_tokens=chunk)


def peaks(costs: tiny.Costs, load: Workload, blocks: list[int]) -> StageBytes:
    profile = tiny.made_up([2 * MIB, 4 * MIB, 4 * MIB, 4 * MIB, 2 * MIB], costs)
    found = Replay(profile, load).run(blocks)
    assert found is not None
    return found


def test_one_device_by_hand() -> None:
    found = peaks(CACHED, workload(100, 1), [0, 1, 2, 3, 4])
    # The third layer works: two caches before it, its own cache, work, its input and its result.
    expected = 16 * MIB + 3 * 100 * 512 + 100 * (4096 + 1024 + 1024)
    assert found.allocated_bytes == expected
    assert found.weight_bytes == 16 * MIB
    assert found.kv_cache_bytes == 3 * 100 * 512
    assert (
        found.weight_bytes + found.kv_cache_bytes + found.activation_bytes == found.allocated_bytes
    )
    assert found.reserved_bytes >= found.allocated_bytes
    assert found.reserved_bytes % (2 * MIB) == 0


def test_a_later_stage_holds_what_is_moved_to_it() -> None:
    found = peaks(PLAIN, workload(100, 1), [2, 3])
    assert found.allocated_bytes == 8 * MIB + 100 * (1024 + 4096 + 1024)
    first = peaks(PLAIN, workload(100, 1), [0])
    assert first.allocated_bytes == 2 * MIB + 100 * (4096 + 1024)


def test_the_result_of_a_stage_lives_until_the_next_device_has_read_it() -> None:
    # Blocks 0 and 4 on one device: what block 4 leaves doesn't add to what block 0 had made.
    found = peaks(PLAIN, workload(100, 1), [0, 4])
    assert found.allocated_bytes == 4 * MIB + 100 * (1024 + 4096 + 1024)


def test_the_cache_grows_while_decoding() -> None:
    found = peaks(CACHED, workload(100, 1001), [1, 2, 3])
    keys = 1100  # the last of the new tokens is never fed back
    # The last layer makes its new cache while its old one is still there.
    assert found.kv_cache_bytes == 3 * keys * 512 + (keys - 1) * 512
    assert found.activation_bytes == 4096 + 1024 + 1024


def test_a_batch_multiplies() -> None:
    one = peaks(PLAIN, workload(100, 1), [1])
    three = peaks(PLAIN, workload(100, 1, batch=3), [1])
    assert three.activation_bytes == 3 * one.activation_bytes


def test_chunks_need_less_to_work_with() -> None:
    whole = peaks(CACHED, workload(1000, 1), [1, 2, 3])
    chunked = peaks(CACHED, workload(1000, 1, chunk=100), [1, 2, 3])
    assert chunked.activation_bytes < whole.activation_bytes / 4


def test_a_capacity_is_kept_or_refused() -> None:
    profile = tiny.made_up([2 * MIB] * 4, CACHED)
    run = Replay(profile, workload(1000, 200)).run
    free = run([0, 1, 2, 3])
    assert free is not None
    tight = run([0, 1, 2, 3], free.allocated_bytes + 4 * MIB)
    if tight is not None:
        assert tight.reserved_bytes <= free.allocated_bytes + 4 * MIB
        assert tight.allocated_bytes == free.allocated_bytes
    assert run([0, 1, 2, 3], free.allocated_bytes - 1) is None
    assert run([0, 1, 2, 3], free.reserved_bytes) == free


def test_the_steps_of_a_workload() -> None:
    profile = tiny.made_up([1024, 1024])
    steps = Replay(profile, workload(10, 4, chunk=4)).steps
    assert [(s.phase, s.query, s.keys) for s in steps] == [
        ("prefill", 4, 4),
        ("extend", 4, 8),
        ("extend", 2, 10),
        ("decode", 1, 11),
        ("decode", 1, 12),
        ("decode", 1, 13),
    ]


def test_a_last_chunk_of_one_token_is_like_a_decode_step() -> None:
    steps = Replay(tiny.made_up([1024, 1024]), workload(9, 1, chunk=4)).steps
    assert [(s.phase, s.query, s.keys) for s in steps][-1] == ("decode", 1, 9)


def test_the_short_replay_keeps_the_ends() -> None:
    short = Replay(tiny.made_up([1024, 1024]), workload(100, 100, chunk=10), brief=True).steps
    assert [s.keys for s in short] == [10, 20, 90, 100, 101, 102, 198, 199]


@settings(max_examples=examples(12))
@given(
    prompt=st.integers(1, 3000),
    new=st.integers(20, 400),
    batch=st.integers(1, 3),
    cache=st.integers(100, 1300),
)
def test_left_out_decode_steps_hardly_matter(prompt: int, new: int, batch: int, cache: int) -> None:
    profile = tiny.made_up([MIB] * 4, tiny.Costs(cache=cache))
    load = workload(prompt, new, batch=batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "_MOST_EVENTS", 10**6)
        every = Replay(profile, load)
        patch.setattr(replay, "_MOST_EVENTS", 0)
        chosen = Replay(profile, load)
    assert len(every.steps) == new > len(chosen.steps)
    for blocks in ([0, 1, 2, 3], [1, 2]):
        few, all_ = chosen.run(blocks), every.run(blocks)
        assert few is not None
        assert all_ is not None
        # A block that is larger than asked for by up to 1 MiB isn't split, and counts whole.
        assert abs(few.allocated_bytes - all_.allocated_bytes) <= len(blocks) * MIB
        assert abs(few.reserved_bytes - all_.reserved_bytes) <= LARGE_SEGMENT_BYTES


def test_nothing_stays_alive_but_weights_and_caches() -> None:
    profile = tiny.made_up([MIB] * 4, CACHED)
    run = replay.StageRun(Replay(profile, workload(50, 20)), [0, 1, 2, 3], None, None)
    run.run()
    assert run.memory.cached == 2 * -(-69 * 512 // 512) * 512
    assert run.memory.allocated == run.memory.requested == 4 * MIB + run.memory.cached


@settings(max_examples=examples(40), deadline=None)
@given(
    load=st.builds(
        Workload,
        prompt_tokens=st.integers(2, 900),
        new_tokens=st.integers(1, 40),
        prefill_chunk_tokens=st.sampled_from([None, 64, 200]),
    ),
    cache=st.sampled_from([0, 512, 40_000]),
    limits=st.lists(st.integers(0, 400), max_size=4),
)
def test_a_replay_that_paused_goes_on_to_what_it_would_have_come_to(
    load: Workload, cache: int, limits: list[int]
) -> None:
    profile = tiny.made_up([2 * MIB, 4 * MIB, 4 * MIB, 2 * MIB], tiny.Costs(cache=cache))
    whole, paused, budget = Replay(profile, load), Replay(profile, load), 300 * MIB
    expected = whole.run([1, 2], budget)
    for limit in sorted(limits):
        found = paused.run([1, 2], budget, usable_bytes=limit * MIB)
        if paused.is_paused([1, 2], budget):
            assert found is not None
            assert limit * MIB < found.reserved_bytes
            assert expected is None or found.reserved_bytes <= expected.reserved_bytes
        else:
            assert found == expected
    assert paused.run([1, 2], budget) == expected
    assert not paused.is_paused([1, 2], budget)


def test_a_stage_that_reserves_too_much_pauses_at_once_and_is_not_replayed_again() -> None:
    profile = tiny.made_up([2 * MIB, 4 * MIB, 4 * MIB, 2 * MIB], tiny.Costs(cache=40_000))
    load = workload(900, 40, chunk=64)
    steps = replay_steps(profile, load, usable_mib=40)
    assert 0 < steps[0] < steps[1] == len(Replay(profile, load).steps)


def replay_steps(profile: Profile, load: Workload, *, usable_mib: int) -> tuple[int, int]:
    """How many steps are replayed up to the pause, and in all when the replay goes on."""
    steps: list[int] = []
    run_step = replay.StageRun.run_pass

    def count(run: replay.StageRun, step: int) -> Any:
        steps.append(step)
        return run_step(run, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay.StageRun, "run_pass", count)
        stage = Replay(profile, load)
        stage.run([1, 2], usable_bytes=usable_mib * MIB)
        before = len(steps)
        stage.run([1, 2])
    assert steps == sorted(steps)
    return before, len(steps)

"""Programs against the oracle: every request one after the other, on a plain allocator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import rehearsing
import tiny
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import MEMORIES, NewMemory, Peaks, only_compiled, plain_run, replays_on
from tiny import MIB

from duoka.forecast.alloc_events import AllocEvents
from duoka.forecast.alloc_program import StageCompiler, StageProgram
from duoka.forecast.device_memory import CompiledMemory, PlainMemory, sizes_of
from duoka.forecast.profile import AllocationTrace, Key, Profile, Ref
from duoka.forecast.replay import Replay
from duoka.forecast.replay_training import replay_of
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import Workload
from duoka.hardware.gpu_generation import GpuGeneration

on_both = pytest.mark.parametrize("new_memory", MEMORIES)
MADE_UP = [
    tiny.made_up([3 * MIB, MIB, MIB, MIB, 2 * MIB], tiny.Costs(cache=4096, work=9000)),
    tiny.made_up([3 * MIB, MIB, MIB, MIB, 0], tiny.Costs(cache=700), tied_to={4: 0}),
    tiny.made_up([100, 200, 200, 300, 300, 100], tiny.Costs(cache=100_000, result=70_000)),
    tiny.made_up([100, *[200] * 6, 300, *[200] * 3, 100], tiny.Costs(cache=9000, work=2000)),
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
    peaks = found.allocated_bytes, found.reserved_bytes, found.requested_bytes
    return *peaks, found.kv_cache_bytes


def check(profile: Profile, workload: Workload, data: st.DataObject) -> None:
    workspace = data.draw(st.sampled_from([0, 3 * MIB // 2, 8_519_680]))
    generation = GpuGeneration(workspace, expandable_segments=data.draw(st.booleans()))
    replay = Replay(profile, replace(workload, gpu_generation=generation))
    for _ in range(3):
        all_blocks = range(len(profile.blocks))
        blocks = sorted(data.draw(st.sets(st.sampled_from(all_blocks), min_size=1)))
        if data.draw(st.booleans()):
            blocks = list(range(blocks[0], blocks[-1] + 1))
        free = run(replay, blocks, None)
        assert free is not None
        assert free == plain_run(replay, blocks, None)
        _, reserved, requested, *_ = free
        capacity = data.draw(st.integers(requested - 1, reserved + 24 * MIB))
        assert run(replay, blocks, capacity) == plain_run(replay, blocks, capacity)


@on_both
@settings(max_examples=examples(25), deadline=None)
@given(profile=st.sampled_from(MADE_UP), workload=workloads, data=st.data())
def test_stages_are_played_as_the_oracle_plays_them(
    new_memory: NewMemory, profile: Profile, workload: Workload, data: st.DataObject
) -> None:
    with replays_on(new_memory):
        check(profile, workload, data)


@on_both
@pytest.mark.parametrize("name", ["llama", pytest.param("tied", marks=pytest.mark.slow)])
@settings(max_examples=examples(2), deadline=None)
@given(workload=workloads, data=st.data())
def test_models_are_played_as_the_oracle_plays_them(
    new_memory: NewMemory, name: str, workload: Workload, data: st.DataObject
) -> None:
    with replays_on(new_memory):
        check(tiny.regular(name), workload, data)


@pytest.mark.parametrize("name", ["made up", "llama"])
def test_repeated_moves_are_those_of_each_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = tiny.made_up([100, *[200] * 9, 300, *[200] * 4, 100], tiny.Costs(cache=9000))
    profile = layers if name == "made up" else tiny.regular(name)
    workload = Workload(prompt_tokens=900, new_tokens=3, dtype="bfloat16", prefill_chunk_tokens=300)
    repeats: list[int] = []
    repeat = StageCompiler._repeat

    def counted(self: StageCompiler, *args: Any) -> int:
        repeats.append(repeat(self, *args))
        return repeats[-1]

    def runs() -> tuple[list[StageBytes | None], dict[tuple[object, ...], StageProgram]]:
        replay, num = Replay(profile, workload), len(profile.blocks)
        stages = itertools.combinations(range(num + 1), 2)
        return [replay.run(range(*stage)) for stage in stages], replay.programs

    monkeypatch.setattr(StageCompiler, "_repeat", counted)
    repeated = runs()
    assert sum(repeats) > (100 if name == "made up" else 0)
    monkeypatch.setattr(StageCompiler, "_repeat", lambda *args: 0)
    assert repeated == runs()


def compiled(
    events: Sequence[Ref | None],
    retained: tuple[int, ...] = (),
    num_kept: int = 0,
    alive: Sequence[Key] = (),
) -> StageProgram:
    """What block 7 does, alone on its device, that has so many caches before."""
    trace = SimpleNamespace(
        profile=SimpleNamespace(blocks={7: SimpleNamespace(kind=0)}),
        trace=lambda block, step: AllocationTrace(
            sizes=(), events=tuple(events), retained=retained
        ),
        steps=[SimpleNamespace(is_graph=False)],
        first_number=lambda block, step: 0,
        key_of=lambda block, ref, step: Profile.key_of(cast(Profile, None), block, ref, 0),
    )
    compiler = StageCompiler(cast(AllocEvents, trace), 0, {7: num_kept}, alive=alive)
    compiler.run(range(7, 8))
    return compiler.program()


BEFORE = Ref(origin="earlier", index=3, back=1)
INPUT = Ref(origin="input", index=0)


@on_both
def test_by_hand(new_memory: NewMemory) -> None:
    """A small request, a large one, a cache; then the large one ends."""
    memory = new_memory(None)
    program = compiled([None, None, None, Ref(origin="own", index=1)], (2,))
    assert program.saved == ((7, 0),)
    assert program.num_kept == (1,)
    cache, left = memory.run(program.code, sizes_of([1000, 3 * MIB, 600]), [], program.live_out)
    assert (cache[1], left[1]) == (1024, 1024)
    assert memory.allocated == memory.requested == 2048
    assert memory.peak == memory.requested_peak == 2048 + 3 * MIB
    assert (memory.cached, memory.cached_at_peak) == (1024, 1024)
    assert memory.max_reserved == 22 * MIB


@on_both
def test_what_others_made_and_what_was_kept_ends_too(new_memory: NewMemory) -> None:
    """A result of the block before, an input, the first of two caches; the other one stays."""
    memory = new_memory(None)
    caches = [memory.hold(size, cached=True) for size in (600, 5000)]
    alive = [memory.hold(1000) for _ in range(3)]
    kept = Ref(origin="kept", index=0)
    program = compiled([BEFORE, INPUT, kept, None], (0,), 2, [(-1, 0), (6, 3), (6, 4)])
    assert program.saved == ((6, 4),)
    assert program.num_kept == (2,)
    found = memory.run(program.code, sizes_of([700]), [*caches, *alive], program.live_out)
    assert [asked for *_, asked in found] == [5120, 1024, 1024]
    assert (memory.allocated, memory.cached) == (1024 + 5120 + 1024, 5120 + 1024)


def test_an_end_of_what_isnt_there_is_nothing() -> None:
    assert compiled([BEFORE, INPUT, Ref(origin="own", index=9)]).code == b""


def test_one_program_serves_all_steps_of_a_kind() -> None:
    """That is what makes a replay quick: a thousand tokens are one program."""
    replay = Replay(
        tiny.regular("llama"),
        Workload(prompt_tokens=600, new_tokens=40, prefill_chunk_tokens=None),
    )
    stage, kinds = range(len(replay.profile.blocks)), dict[int, StageProgram]()
    for step in range(1, len(replay.steps)):
        compiler = StageCompiler(replay, step, dict.fromkeys(stage, 2))
        compiler.run(stage)
        program = compiler.program()
        assert kinds.setdefault(replay.steps[step].regime, program) == program
    assert len(kinds) == 1


TRAINED = rehearsing.made_up([rehearsing.Layer(weight=900_000, result=3000, saved=70_000)] * 4)
WORKLOADS = [
    ("llama", Workload(prompt_tokens=700, new_tokens=40, prefill_chunk_tokens=256)),
    ("tied", Workload(batch=3, prompt_tokens=500, new_tokens=5, prefill_chunk_tokens=None)),
    ("trained", rehearsing.load(9, micro_batches=9, method="full", schedule="1f1b")),
    ("trained", rehearsing.load(300, micro_batches=3, method="full", schedule="gpipe")),
    ("trained", rehearsing.load(40, micro_batches=5, method="full", optimizer="sgd")),
]


@only_compiled
@pytest.mark.parametrize(("name", "workload"), WORKLOADS)
def test_replays_are_the_same_on_both(name: str, workload: Workload) -> None:
    profile = TRAINED if name == "trained" else tiny.regular(name)
    everything = list(range(len(profile.blocks)))
    found: list[list[Any]] = []
    for new in (PlainMemory, CompiledMemory):
        assert new is not None
        with replays_on(new):
            replay = replay_of(profile, workload, place=3)
            free = replay.run(everything)
            assert free is not None
            capacities = [
                free.requested_bytes - 1,
                (free.requested_bytes + free.reserved_bytes) // 2,
                free.reserved_bytes,
            ]
            stages = [everything, everything[:2], everything[1:], everything[::2]]
            found.append(
                [replay.run(stage, most) for stage in stages for most in (None, *capacities)]
            )
    assert found[0] == found[1]
    assert None in found[0]

"""The compiled memory, the one in Python and a plain model of the allocator do the same."""

from __future__ import annotations

import shlex
import shutil
import struct
import sys
import sysconfig
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from replaying import MEMORIES, MIB, NewMemory, Piece, PlainAllocator, only_compiled

from duoka.forecast.allocator import END_OF_ADDRESSES, OutOfCapacity
from duoka.forecast.device_memory import (
    FREE,
    CompiledMemory,
    Held,
    PlainMemory,
    new_memory,
    sizes_of,
)

ATTRIBUTES = (
    *("allocated", "requested", "cached", "aside", "max_reserved", "is_pressed"),
    *("peak", "requested_peak", "cached_at_peak", "aside_at_peak"),
)
COMPILER = shlex.split(sysconfig.get_config_var("CC") or "cc")[0]
HEADER = Path(sysconfig.get_path("include")) / "Python.h"


def program_of(moves: Sequence[tuple[int, int, bool]]) -> bytes:
    return array("q", [number for move in moves for number in move]).tobytes()


@pytest.mark.skipif(
    shutil.which(COMPILER) is None or not HEADER.exists(), reason="no C compiler, or no Python.h"
)
def test_it_is_compiled_where_it_can_be() -> None:
    hint = "build it again: rm -f .venv/.duoka-installed && make test, or pip install -e ."
    assert CompiledMemory is not None, hint
    assert type(new_memory(None)) is CompiledMemory
    built = Path(str(sys.modules["duoka.forecast._memory"].__file__))
    sources = [path for path in built.parent.iterdir() if path.suffix in (".c", ".h")]
    assert all(path.stat().st_mtime <= built.stat().st_mtime for path in sources), hint


def state(memory: PlainMemory) -> dict[str, Any]:
    return {name: getattr(memory, name) for name in ATTRIBUTES}


@dataclass
class Hold:
    size: int
    cached: bool


@dataclass
class Release:
    index: int


@dataclass
class Run:
    """Some of what lives is given; a slot's next move is an end where there is something in it."""

    num_given: int
    moves: list[tuple[int, int, bool]]
    """Each a slot, a size, and whether it's an end in any case."""


@dataclass
class Trio:
    """Three that must do the same, and what lives: as it was given, as a cache, on the plain one.

    Without a compiled memory the two are the one in Python.
    """

    capacity: int | None
    expandable: bool = False
    memories: list[PlainMemory] = field(init=False)
    plain: PlainAllocator = field(init=False)
    live: list[tuple[Held, bool, Piece]] = field(default_factory=list)

    def __post_init__(self) -> None:
        kinds = PlainMemory, CompiledMemory or PlainMemory
        self.memories = [kind(self.capacity, self.expandable) for kind in kinds]
        self.plain = PlainAllocator(self.capacity, self.expandable)

    def step(self, step: Hold | Release | Run | int) -> bool:
        """Whether there was room for it."""
        if isinstance(step, int):
            for memory in self.memories:
                memory.aside = step
        elif isinstance(step, Run):
            return self.run(step)
        elif isinstance(step, Hold):
            held = self.both(lambda memory: memory.hold(step.size, step.cached))
            piece = self.malloc(step.size)
            assert (held is None) == (piece is None)
            if held is None or piece is None:
                return False
            assert held[1:] == (piece.size, piece.asked)
            self.live.append((held, step.cached, piece))
        elif self.live:
            held, cached, piece = self.live.pop(step.index % len(self.live))
            self.both(lambda memory: memory.release(held, cached))
            self.plain.free(piece)
        return True

    def run(self, step: Run) -> bool:
        given = [self.live.pop() for _ in range(min(step.num_given, len(self.live)))]
        slots: dict[int, Piece] = {slot: piece for slot, (*_, piece) in enumerate(given)}
        is_cached = {slot: cached for slot, (_, cached, _) in enumerate(given)}
        moves, sizes, fits = [], [], True
        for slot, size, is_end in step.moves:
            slot %= len(given) + len(step.moves)
            cached = is_cached.setdefault(slot, size % 2 == 0)
            if slot in slots or is_end:
                moves.append((slot, FREE, cached))
                if fits and slot in slots:
                    self.plain.free(slots.pop(slot))
                continue
            moves.append((slot, len(sizes), cached))
            sizes.append(size)
            piece = self.malloc(size) if fits else None
            fits = piece is not None
            if piece is not None:
                slots[slot] = piece
        out = tuple(slots)
        program, packed = program_of(moves), sizes_of(sizes)
        found = self.both(
            lambda memory: memory.run(program, packed, [held for held, *_ in given], out)
        )
        assert (found is not None) == fits
        for slot, held in zip(out, found or [], strict=fits):
            assert held[1:] == (slots[slot].size, slots[slot].asked)
            self.live.append((held, is_cached[slot], slots[slot]))
        return fits

    def both(self, do: Callable[[PlainMemory], Any]) -> Any:
        """What both give; None where both refuse with the same numbers."""
        found = []
        for memory in self.memories:
            try:
                found.append(do(memory))
            except OutOfCapacity as error:
                found.append(vars(error))
        first, second = found
        assert first == second
        return None if isinstance(first, dict) else first

    def malloc(self, size: int) -> Piece | None:
        try:
            return self.plain.malloc(size)
        except MemoryError:
            return None

    def check(self) -> None:
        first, second = map(state, self.memories)
        assert first == second
        used = self.plain.used()
        assert first["allocated"] == sum(piece.size for piece in used)
        assert first["requested"] == sum(piece.asked for piece in used)
        assert first["max_reserved"] == self.plain.most_reserved
        assert first["is_pressed"] == self.plain.pressed


def around(*sizes: int) -> st.SearchStrategy[int]:
    """What blocks, segments and splits depend on, with a little more or less."""
    more = st.sampled_from([-513, -512, -1, 0, 1, 512, 513])
    return st.builds(int.__add__, st.sampled_from(sizes), more)


sizes = st.one_of(
    around(512, 2048, MIB, MIB + 512, 2 * MIB, 10 * MIB, 18 * MIB, 19 * MIB, 20 * MIB),
    st.integers(0, 3 * MIB),
    st.integers(1, 60 * MIB),
)
run_steps = st.builds(
    Run,
    st.integers(0, 4),
    st.lists(st.tuples(st.integers(0, 9), sizes, st.booleans()), min_size=3, max_size=12),
)
hold_steps = st.builds(Hold, sizes, st.booleans())
release_steps = st.builds(Release, st.integers(0, 50))
steps = st.one_of(st.integers(0, MIB), release_steps, release_steps, hold_steps, run_steps)
capacities = st.one_of(st.none(), st.integers(-1, 2 * MIB), st.integers(20 * MIB, 200 * MIB))


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(steps, min_size=20, max_size=60), capacities, st.booleans())
def test_all_do_the_same_step_for_step(
    history: list[Hold | Release | Run | int], capacity: int | None, expandable: bool
) -> None:
    trio = Trio(capacity, expandable)
    layouts: list[list[Any]] = [[], []]
    for step in history:
        has_room = trio.step(step)
        trio.check()
        for memory, seen in zip(trio.memories, layouts, strict=True):
            seen.append(memory.free_blocks())
        if not has_room and isinstance(step, Run):
            break  # what was in its slots is lost
    # What is free is equal for the one where it is for the other.
    first, second = ([seen.index(layout) for layout in seen] for seen in layouts)
    assert first == second


@pytest.mark.parametrize("new", MEMORIES)
@pytest.mark.parametrize("capacity", [None, 2**62])
def test_addresses_end_somewhere_and_none_is_given_out_twice(
    new: NewMemory, capacity: int | None
) -> None:
    memory = new(capacity)
    for num_bytes in (2**70, END_OF_ADDRESSES + 1):
        with pytest.raises(OutOfCapacity):
            memory.hold(num_bytes)
    assert memory.is_pressed
    half = END_OF_ADDRESSES // 2
    memory.release(memory.hold(half))
    memory.hold(half // 2)  # of the first half
    memory.hold(half // 2)
    memory.hold(half - 2 * MIB)
    with pytest.raises(OutOfCapacity) as refused:
        memory.hold(5 * MIB)
    assert vars(refused.value) == {
        "requested_bytes": 5 * MIB,
        "capacity_bytes": capacity or END_OF_ADDRESSES,
        "allocated_bytes": 2 * half - 2 * MIB,
        "reserved_bytes": 2 * half - 2 * MIB,
    }


@pytest.mark.parametrize("new", MEMORIES)
def test_numbers_of_any_size(new: NewMemory) -> None:
    assert new(2**70).hold(-(2**70)) == (0, 512, 512)
    for capacity in (-(2**70), 0):
        with pytest.raises(OutOfCapacity):
            new(capacity).hold(1)


def snapshot(memory: PlainMemory) -> tuple[Any, ...]:
    return state(memory), memory.free_blocks()


def numbers(*values: int) -> bytes:
    return struct.pack(f"{len(values)}q", *values)


@only_compiled
@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("hold", (), TypeError),
        ("hold", (1.5,), TypeError),
        ("release", (), TypeError),
        ("release", ([0, 512, 512],), TypeError),
        ("release", ((0, 512),), TypeError),
        ("release", ((0, 512, 2**63),), OverflowError),
        ("release", ((0, 0, 0),), ValueError),  # a block without a byte
        ("release", ((0, 512, 513),), ValueError),  # more was asked for than there is
        ("release", ((0, 1536, 1536),), ValueError),  # its end is free
        ("release", ((512, 512, 512),), ValueError),  # free
        ("release", ((0, 2**62, 512),), ValueError),
        ("release", ((-(2**63), 2**63 - 1, 1),), ValueError),
        ("release", ((2 * MIB, 512, 512),), ValueError),  # between segments
        ("release", ((2 * MIB + 512, 512, 512),), ValueError),  # of the other pool
        ("run", (b"", b"", []), TypeError),
        ("run", (bytearray(24), b"", [], ()), TypeError),
        ("run", (b"", b"", (), ()), TypeError),
        ("run", (b"", b"", [1], ()), TypeError),
        ("run", (b"", b"", [(0, 512, 2**63)], ()), OverflowError),
        ("run", (b"", bytes(9), [], ()), ValueError),
        ("run", (numbers(-1, 0, 0), numbers(1), [], ()), ValueError),
        ("run", (numbers(1, 0, 0), numbers(1), [], ()), ValueError),
        ("run", (numbers(0, 2**63 - 1, 0), numbers(1), [], ()), ValueError),
        ("run", (numbers(0, -2, 0), numbers(1), [], ()), ValueError),
        ("run", (numbers(0, 0, 0), b"", [], ()), ValueError),
        ("run", (numbers(0, FREE, 0), b"", [(512, 512, 512)], ()), ValueError),
        ("run", (b"", b"", [], (0,)), ValueError),
        ("run", (b"", b"", [None], (0,)), TypeError),
        ("run", (b"", b"", [], (-1,)), ValueError),
        ("run", (b"", b"", [], (2**70,)), OverflowError),
        ("free_blocks", (1,), TypeError),
    ],
)
def test_wrong_arguments_are_refused_and_change_nothing(
    method: str, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    memory = new_memory(40 * MIB)
    one, other = memory.hold(1), memory.hold(1)
    cache, large = memory.hold(1, cached=True), memory.hold(5 * MIB, cached=True)
    memory.release(other)
    before = snapshot(memory)
    with pytest.raises(error):
        getattr(memory, method)(*arguments)
    assert snapshot(memory) == before
    memory.release(large, cached=True)
    memory.release(cache, cached=True)
    memory.release(one)
    assert memory.allocated == memory.requested == memory.cached == 0


@only_compiled
def test_what_is_given_back_twice_is_refused() -> None:
    memory = new_memory(None)
    held = memory.hold(1)
    memory.release(held)
    with pytest.raises(ValueError, match="isn't in use"):
        memory.release(held)
    held = memory.hold(1)
    back = program_of([(0, FREE, False), (1, FREE, False)])
    with pytest.raises(ValueError, match="isn't in use"):
        memory.run(back, b"", [held, held], ())
    assert memory.allocated == 0


@only_compiled
@pytest.mark.parametrize("cached", [False, True])
def test_caches_are_given_back_as_such(cached: bool) -> None:
    memory = new_memory(None)
    held, _ = memory.hold(1, cached), memory.hold(1, cached)
    with pytest.raises(ValueError, match="not as that"):
        memory.release(held, not cached)
    memory.release(held, cached)
    assert memory.allocated == 512


@only_compiled
def test_only_what_is_set_from_outside_can_be() -> None:
    assert CompiledMemory is not None
    memory: Any = CompiledMemory(None)
    for name in set(ATTRIBUTES) - {"aside"}:
        with pytest.raises(AttributeError):
            setattr(memory, name, 1)
    for value, error in (("1", TypeError), (2**70, OverflowError)):
        with pytest.raises(error):
            memory.aside = value
    with pytest.raises(TypeError):
        del memory.aside
    wrong: Any = CompiledMemory
    for arguments in (("1",), (1, True, 2), (1.5,)):
        with pytest.raises(TypeError):
            wrong(*arguments)


class Meddler:
    """An integer, and no `int`: what reads it as one runs code of ours meanwhile."""

    def __init__(self, memory: PlainMemory, given: list[Any]) -> None:
        self.memory, self.given = memory, given

    def __index__(self) -> int:
        self.given.clear()
        self.memory.run(program_of([(slot, FREE, False) for slot in range(999)]), b"", [], ())
        return 512


@only_compiled
def test_nobody_meddles_with_a_program_that_runs() -> None:
    memory = new_memory(None)
    given: list[Any] = []
    given += [(0, 512, Meddler(memory, given)), None]
    with pytest.raises(TypeError):
        memory.run(b"", b"", given, ())
    assert len(given) == 2


places = st.integers(-1, 12).map(lambda place: place * MIB // 4)
anything = st.one_of(
    st.builds(Hold, st.sampled_from([1, 512, MIB // 4, MIB, 3 * MIB]), st.booleans()),
    st.tuples(places, places, places, st.booleans()),
)


@only_compiled
@settings(deadline=None)
@given(st.lists(anything, min_size=20, max_size=60), st.sampled_from([(8, False), (24, True)]))
def test_whatever_is_given_back_what_is_free_stays_apart(
    history: Sequence[Any], device: tuple[int, bool]
) -> None:
    memory = new_memory(device[0] * MIB, device[1])
    for step in history:
        try:
            if isinstance(step, Hold):
                memory.hold(step.size, step.cached)
            else:
                memory.release(step[:3], step[3])
        except (OutOfCapacity, ValueError):
            pass
        for free in memory.free_blocks():
            assert isinstance(free, bytes)
            blocks = list(struct.iter_unpack("2q", free))
            assert all(size > 0 for _, size in blocks)
            ends = [start + size for start, size in blocks]
            assert all(end < start for end, (start, _) in zip(ends, blocks[1:], strict=False))
        assert 0 <= memory.cached <= memory.allocated
        assert 0 <= memory.requested <= memory.allocated

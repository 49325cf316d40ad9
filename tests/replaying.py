"""The replay's oracle: every request and every end of one, one after the other, on a plain model
of the allocator that searches lists; and replays on one memory or the other."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from duoka.forecast import replay
from duoka.forecast.allocator import OutOfCapacity, rounded_bytes, segment_bytes
from duoka.forecast.device_memory import CompiledMemory, PlainMemory
from duoka.forecast.profile import Key, buffer_bytes, evaluate
from duoka.forecast.replay import Replay

MIB = 2**20
NewMemory = Callable[..., PlainMemory]
only_compiled = pytest.mark.skipif(CompiledMemory is None, reason="no C compiler was there")
MEMORIES = [
    pytest.param(PlainMemory, id="plain"),
    pytest.param(CompiledMemory, id="compiled", marks=only_compiled),
]


@contextmanager
def replays_on(new_memory: NewMemory) -> Iterator[None]:
    """Replays on such a memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "new_memory", new_memory)
        yield


@dataclass(eq=False)
class Piece:
    """A run of bytes in a segment."""

    size: int
    asked: int = 0  # rounded; 0 while it is free
    mapped: bool = True  # to memory, always but in expandable segments


class Segment(list[Piece]):
    """Its pieces, in order of their addresses."""


@dataclass
class PlainAllocator:
    """Segments as lists of pieces, in the order in which they were reserved."""

    capacity: int | None = None
    expandable: bool = False
    segments: list[tuple[bool, Segment]] = field(default_factory=list)
    reserved: int = 0
    most_reserved: int = 0
    pressed: bool = False

    def malloc(self, num_bytes: int) -> Piece:
        size = rounded_bytes(num_bytes)
        small = size <= MIB
        piece = self._found(size, small)
        if piece is None:
            grow = self._mapped if self.expandable else self._added
            if not grow(size, small):
                self.pressed = True
                self.empty_cache()
                if not grow(size, small):
                    raise MemoryError
            piece = self._found(size, small)
            assert piece is not None
        piece.asked = size
        rest = piece.size - size
        if rest >= 512 if small or self.expandable else rest > MIB:
            (pieces,) = [pieces for _, pieces in self.segments if piece in pieces]
            pieces.insert(pieces.index(piece) + 1, Piece(rest))
            piece.size = size
        return piece

    def free(self, piece: Piece) -> None:
        assert piece.asked
        piece.asked = 0
        (pieces,) = [pieces for _, pieces in self.segments if piece in pieces]
        merge(pieces)

    def empty_cache(self) -> None:
        for small, pieces in [*self.segments]:
            reserved = self.reserved
            if self.expandable:
                self._unmap(pieces, (2 if small else 20) * MIB)
            elif len(pieces) == 1 and not pieces[0].asked:
                self.reserved -= pieces[0].size
                pieces[0].mapped = False
            if self.reserved < reserved and not any(piece.mapped for piece in pieces):
                self.segments = [each for each in self.segments if each[1] is not pieces]

    def _unmap(self, pieces: Segment, page: int) -> None:
        start, kept = 0, list[Piece]()
        for piece in pieces:
            end = start + piece.size
            inner = range(-(-start // page) * page, end // page * page)
            if piece.asked or not piece.mapped or not inner:
                kept.append(piece)
            else:
                sizes = (inner.start - start, False), (len(inner), True), (end - inner.stop, False)
                kept += [Piece(size, mapped=not inside) for size, inside in sizes]
                self.reserved -= len(inner)
            start = end
        pieces[:] = kept
        merge(pieces)

    def _added(self, size: int, small: bool) -> bool:
        room = segment_bytes(size)
        if not self._reserve(room):
            return False
        self.segments.append((small, Segment([Piece(room)])))
        return True

    def _mapped(self, size: int, small: bool) -> bool:
        page = (2 if small else 20) * MIB
        pieces, at = self._expandable(size, small)
        if not pieces:
            most = min(self.capacity or 2**50, 2**50)
            room = -(-(most * 9 // 8) // page) * page
            if size > room:
                return False
            pieces.append(Piece(room, mapped=False))
            self.segments.append((small, pieces))
        while (have := pieces[at].size if pieces[at].mapped else 0) < size:
            run = pieces[at + pieces[at].mapped]
            pages = -(-min(size - have, run.size) // page) * page
            if not self._reserve(pages):
                return False
            run.size -= pages
            pieces.insert(pieces.index(run), Piece(pages))
            merge(pieces)
        return True

    def _expandable(self, size: int, small: bool) -> tuple[Segment, int]:
        for kind, pieces in self.segments:
            for at, run in enumerate(pieces):
                if kind != small or run.mapped:
                    continue
                first = at - 1 if at and not pieces[at - 1].asked else at
                free = itertools.takewhile(lambda piece: not piece.asked, pieces[first:])
                if sum(piece.size for piece in free) >= size:
                    return pieces, first
        return Segment(), 0

    def _reserve(self, size: int) -> bool:
        if self.capacity is not None and self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.most_reserved = max(self.most_reserved, self.reserved)
        return True

    def used(self) -> list[Piece]:
        return [piece for _, pieces in self.segments for piece in pieces if piece.asked]

    def _found(self, size: int, small: bool) -> Piece | None:
        free = [
            (
                piece.size,
                number,
                piece.size + (0 if after is None or after.mapped else after.size),
                piece,
            )
            for number, (pieces, piece, after) in enumerate(
                (pieces, piece, after)
                for kind, pieces in self.segments
                if kind == small
                for piece, after in itertools.zip_longest(pieces, pieces[1:])
            )
            if piece.mapped and not piece.asked and piece.size >= size
        ]
        free.sort(key=lambda each: each[:2])  # the first of equals
        while len(free) > 1 and free[1][2] < free[0][2]:
            del free[0]
        return free[0][3] if free else None


def merge(pieces: list[Piece]) -> None:
    """Merge what is free side by side, and drop what has no byte."""
    merged: list[Piece] = []
    for each in pieces:
        if merged and not merged[-1].asked and not each.asked and merged[-1].mapped == each.mapped:
            merged[-1].size += each.size
        elif each.size:
            merged.append(each)
    pieces[:] = merged


Peaks = tuple[int, int, int, int]


def plain_run(replay: Replay, blocks: Sequence[int], capacity: int | None) -> Peaks | None:
    """What `Replay.run` finds: allocated, reserved, requested, cached at the peak."""
    try:
        return _Plain(replay, frozenset(blocks), capacity).run()
    except (MemoryError, OutOfCapacity):
        return None


class _Plain:
    def __init__(self, replay: Replay, blocks: frozenset[int], capacity: int | None) -> None:
        self.replay, self.blocks = replay, blocks
        self.allocator = PlainAllocator(capacity, replay.has_expandable_segments)
        self.alive: dict[Key, Piece] = {}
        self.kept: dict[int, list[Piece]] = {block: [] for block in blocks}
        self.workspace = replay.workspace_bytes
        self.allocated = self.requested = self.cached = 0
        self.peak = self.requested_peak = self.cached_at_peak = 0

    def run(self) -> Peaks:
        replay, profile = self.replay, self.replay.profile
        for block in sorted(self.blocks):
            for size in profile.kinds[profile.blocks[block].kind].weight_bytes:
                self.malloc(size)
        for size in buffer_bytes(profile.streamed_bytes(sorted(self.blocks))):
            self.malloc(size)
        for step in range(len(replay.steps)):
            for block in range(len(profile.blocks)):
                if block in self.blocks:
                    self.block(block, step)
                    continue
                for ref in replay.foreign_frees(block, step):
                    self.release(replay.key_of(block, ref, step))
            for key in list(self.alive):
                self.release(key)
        reserved = self.allocator.most_reserved
        return self.peak, reserved, self.requested_peak, self.cached_at_peak

    def read_in(self, block: int, step: int) -> None:
        replay = self.replay
        for read in replay.trace(block, step).reads:
            key = replay.key_of(block, read.ref, step)
            here = key[0] in self.blocks or (key[0] == -1 and 0 in self.blocks)
            if not here and key not in self.alive:
                size = evaluate(read.size, replay.steps[step].values)
                self.alive[key] = self.malloc(size)

    def block(self, block: int, step: int) -> None:
        self.read_in(block, step)
        replay = self.replay
        sizes = replay.sizes(block, step)
        slots: list[Piece | None] = [*self.kept[block]]
        born = []
        trace, number = replay.trace(block, step), 0
        for position, ref in enumerate(trace.events):
            if position == trace.matmul_at:
                self.multiply()
            if ref is None and number in trace.retained:
                born.append(self.malloc(sizes[number], cached=True))
            elif ref is None:
                self.alive[block, number] = self.malloc(sizes[number])
            elif ref.origin == "kept":
                dropped = slots[ref.index]
                assert dropped is not None
                slots[ref.index] = None
                self.free(dropped, cached=True)
            else:
                self.release(replay.key_of(block, ref, step))
            number += ref is None
        if trace.matmul_at == len(trace.events):
            self.multiply()
        self.kept[block] = [slot for slot in slots if slot is not None] + born

    def multiply(self) -> None:
        if self.workspace:
            self.malloc(self.workspace)
            self.workspace = 0

    def malloc(self, size: int, *, cached: bool = False) -> Piece:
        piece = self.allocator.malloc(size)
        self.allocated += piece.size
        self.requested += piece.asked
        self.cached += piece.size * cached
        if self.allocated >= self.peak:
            self.peak, self.cached_at_peak = self.allocated, self.cached
        self.requested_peak = max(self.requested_peak, self.requested)
        return piece

    def free(self, piece: Piece, *, cached: bool = False) -> None:
        self.allocated -= piece.size
        self.requested -= piece.asked
        self.cached -= piece.size * cached
        self.allocator.free(piece)

    def release(self, key: Key) -> None:
        if (piece := self.alive.pop(key, None)) is not None:
            self.free(piece)

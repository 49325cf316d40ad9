"""The replay's oracle: every request and every end of one, one after the other, on a plain model
of the allocator that searches lists; and replays on one memory or the other."""

from __future__ import annotations

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
NewMemory = Callable[[int | None], PlainMemory]
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


@dataclass
class PlainAllocator:
    """Segments as lists of pieces, in the order in which they were reserved."""

    capacity: int | None = None
    segments: list[tuple[bool, list[Piece]]] = field(default_factory=list)
    reserved: int = 0
    most_reserved: int = 0
    pressed: bool = False

    def malloc(self, num_bytes: int) -> Piece:
        size = rounded_bytes(num_bytes)
        small = size <= MIB
        piece = self._found(size, small)
        if piece is None:
            room = segment_bytes(size)
            if self.capacity is not None and self.reserved + room > self.capacity:
                self.pressed = True
                for segment in [s for s in self.segments if len(s[1]) == 1 and not s[1][0].asked]:
                    self.reserved -= segment[1][0].size
                    self.segments = [each for each in self.segments if each is not segment]
                if self.reserved + room > self.capacity:
                    raise MemoryError
            self.segments.append((small, [Piece(room)]))
            self.reserved += room
            self.most_reserved = max(self.most_reserved, self.reserved)
            piece = self._found(size, small)
            assert piece is not None
        piece.asked = size
        rest = piece.size - size
        if rest >= 512 if small else rest > MIB:
            (pieces,) = [pieces for _, pieces in self.segments if piece in pieces]
            pieces.insert(pieces.index(piece) + 1, Piece(rest))
            piece.size = size
        return piece

    def free(self, piece: Piece) -> None:
        assert piece.asked
        piece.asked = 0
        (pieces,) = [pieces for _, pieces in self.segments if piece in pieces]
        merged: list[Piece] = []
        for each in pieces:
            if merged and not merged[-1].asked and not each.asked:
                merged[-1].size += each.size
            else:
                merged.append(each)
        pieces[:] = merged

    def used(self) -> list[Piece]:
        return [piece for _, pieces in self.segments for piece in pieces if piece.asked]

    def _found(self, size: int, small: bool) -> Piece | None:
        free = [
            piece
            for kind, pieces in self.segments
            for piece in pieces
            if kind == small and not piece.asked and piece.size >= size
        ]
        return min(free, key=lambda piece: piece.size, default=None)  # the first of equals


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
        self.allocator = PlainAllocator(capacity)
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

"""Memory: one device's, as the allocator gives it out, with what is in use there and its peaks.

Two do the same: `PlainMemory`, and one that is compiled (`_memory.c`), for as long as planning takes
is as long as this takes. The latter is there where a C compiler was, when duoka was installed.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Protocol

from .allocator import ADDRESS, ADDRESS_BITS, Block, CachingAllocator, rounded_bytes

try:
    from ._memory import Memory as CompiledMemory
except ImportError:  # no C compiler was there
    CompiledMemory = None  # type: ignore[assignment,misc]

Held = tuple[int, int, int]
"""What a request was given: its address, its bytes, and those that were asked for, rounded."""

BACK = -1

Move = tuple[int, int, bool]
"""A request or the end of one: its slot; the index of its size, or `BACK` for the end; and whether
it is a cache or a gradient."""


class Memory(Protocol):
    """One device's memory.

    All numbers are bytes.

    Attributes
    ----------
    allocated, requested : int
        In use now: the blocks, and what was asked for, rounded, without what blocks have left
        unsplit.
    peak, requested_peak : int
        The most of each.
    cached, cached_at_peak : int
        What of `allocated` are caches or gradients, now and at its peak.
    aside, aside_at_peak : int
        What of it whoever holds it tells apart, and sets.
    max_reserved : int
        The most that was taken from the device.
    is_pressed : bool
        Whether the capacity was ever reached, and cached segments were given back.
    """

    aside: int

    @property
    def allocated(self) -> int: ...
    @property
    def requested(self) -> int: ...
    @property
    def peak(self) -> int: ...
    @property
    def requested_peak(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def cached_at_peak(self) -> int: ...
    @property
    def aside_at_peak(self) -> int: ...
    @property
    def max_reserved(self) -> int: ...
    @property
    def is_pressed(self) -> bool: ...

    def hold(self, num_bytes: int, cached: bool = False) -> Held:
        """Allocate.

        Raises
        ------
        OutOfCapacity
            As `CachingAllocator.malloc` does.
        """

    def release(self, held: Held, cached: bool = False) -> None:
        """Free."""

    def run(
        self,
        program: bytes,
        sizes: bytes,
        num_slots: int,
        given: Sequence[Held | None],
        out: tuple[int, ...],
    ) -> list[Held]:
        """Allocate and free, one after the other.

        Parameters
        ----------
        program, sizes : bytes
            As `program_of` and `sizes_of` make them.
        num_slots : int
            How many slots the program has.
        given : sequence of Held, optional
            What is in the first ones at the beginning. An end of what isn't there is nothing.
        out : tuple of int
            The slots that are wanted.

        Returns
        -------
        list of Held
            What is in them at the end.

        Raises
        ------
        OutOfCapacity
            As `CachingAllocator.malloc` does; the program has been run up to there.
        """

    def free_blocks(self) -> tuple[Hashable, Hashable]:
        """Of the small pool and of the large one: equal where these are."""


def new_memory(capacity_bytes: int | None) -> Memory:
    """The memory of a device; without a capacity nothing is refused."""
    return (CompiledMemory or PlainMemory)(capacity_bytes)


def program_of(moves: Sequence[Move]) -> bytes:
    """What `Memory.run` takes."""
    return array("q", [number for move in moves for number in move]).tobytes()


def sizes_of(sizes: Sequence[int]) -> bytes:
    """The bytes of each request of a program, for `Memory.run`."""
    return array("q", sizes).tobytes()


class PlainMemory:
    """The same as the compiled one, in Python."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._allocator = CachingAllocator(capacity_bytes)
        self.allocated = self.peak = self.requested = self.requested_peak = 0
        self.cached = self.cached_at_peak = self.aside = self.aside_at_peak = 0

    @property
    def max_reserved(self) -> int:
        return self._allocator.max_reserved_bytes

    @property
    def is_pressed(self) -> bool:
        return self._allocator.is_pressed

    def hold(self, num_bytes: int, cached: bool = False) -> Held:
        asked = rounded_bytes(num_bytes)
        return _held(self._take(asked, cached), asked)

    def release(self, held: Held, cached: bool = False) -> None:
        address, size, asked = held
        self._give(size << ADDRESS_BITS | address, asked, cached)

    def run(
        self,
        program: bytes,
        sizes: bytes,
        num_slots: int,
        given: Sequence[Held | None],
        out: tuple[int, ...],
    ) -> list[Held]:
        numbers, asked = array("q", program), array("q", sizes)
        slots: list[tuple[Block, int] | None] = [None] * num_slots
        for slot, held in enumerate(given):
            if held is not None:
                address, size, each = held
                slots[slot] = size << ADDRESS_BITS | address, each
        moves = iter(numbers)
        for slot, index, is_cached in zip(moves, moves, moves, strict=True):
            if index != BACK:
                size = rounded_bytes(asked[index])
                slots[slot] = self._take(size, bool(is_cached)), size
            elif (there := slots[slot]) is not None:
                self._give(*there, bool(is_cached))
        return [_held(*there) for slot in out if (there := slots[slot]) is not None]

    def free_blocks(self) -> tuple[Hashable, Hashable]:
        return tuple(self._allocator.small.free), tuple(self._allocator.large.free)

    def _take(self, asked: int, cached: bool) -> Block:
        block = self._allocator.take(asked)
        size = block >> ADDRESS_BITS
        self.requested += asked
        self.allocated += size
        if cached:
            self.cached += size
        if self.requested > self.requested_peak:
            self.requested_peak = self.requested
        if self.allocated >= self.peak:
            self.peak = self.allocated
            self.cached_at_peak, self.aside_at_peak = self.cached, self.aside
        return block

    def _give(self, block: Block, asked: int, cached: bool) -> None:
        self._allocator.give(block)
        size = block >> ADDRESS_BITS
        self.requested -= asked
        self.allocated -= size
        if cached:
            self.cached -= size


def _held(block: Block, asked: int) -> Held:
    return block & ADDRESS, block >> ADDRESS_BITS, asked

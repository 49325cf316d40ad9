"""Memory: one device's, as the allocator gives it out, with what is in use there and its peaks.

Two do the same: `PlainMemory`, and one that is compiled (`_memory.c`), for planning takes as long
as this does. The latter is there where a C compiler was when duoka was installed; for the types of
Python it is a `PlainMemory`, which it equals method for method.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence

from .allocator import ADDRESS, ADDRESS_BITS, CachingAllocator, rounded_bytes

CompiledMemory: Callable[[int | None], PlainMemory] | None
try:
    from ._memory import Memory as CompiledMemory
except ImportError:  # no C compiler was there
    CompiledMemory = None

Held = tuple[int, int, int]
"""What a request was given: its address, its bytes, and those that were asked for, rounded."""

FREE = -1


def new_memory(capacity_bytes: int | None) -> PlainMemory:
    """The memory of a device; without a capacity nothing is refused."""
    if CompiledMemory is None:
        return PlainMemory(capacity_bytes)
    return CompiledMemory(capacity_bytes)


def sizes_of(sizes: Sequence[int]) -> bytes:
    """The bytes of each request of a program, for `run`."""
    return array("q", sizes).tobytes()


class PlainMemory:
    """One device's memory; all numbers are bytes.

    Of what is `allocated`, in blocks that are in use, tensors `requested` so much, rounded, without
    what blocks have left unsplit; `cached` blocks are caches or gradients; and what is `aside`
    whoever holds it tells apart, and sets. At the `peak` of what was allocated `cached_at_peak` and
    `aside_at_peak` were that; `requested_peak` is the most that was requested.
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self._allocator = CachingAllocator(capacity_bytes)
        self.peak = self.requested = self.requested_peak = 0
        self.cached = self.cached_at_peak = self.aside = self.aside_at_peak = 0

    @property
    def allocated(self) -> int:
        """In blocks that are in use."""
        return self._allocator.allocated_bytes

    @property
    def max_reserved(self) -> int:
        """The most that was taken from the device."""
        return self._allocator.max_reserved_bytes

    @property
    def is_pressed(self) -> bool:
        """Whether the capacity was ever reached, and cached segments were given back."""
        return self._allocator.is_pressed

    def hold(self, num_bytes: int, cached: bool = False) -> Held:
        """Allocate."""
        requested = rounded_bytes(num_bytes)
        allocator = self._allocator
        block = allocator.take(requested)
        size = block >> ADDRESS_BITS
        allocator.allocated_bytes += size
        self.requested += requested
        self.cached += size * cached
        if self.requested > self.requested_peak:
            self.requested_peak = self.requested
        if allocator.allocated_bytes >= self.peak:
            self.peak = allocator.allocated_bytes
            self.cached_at_peak, self.aside_at_peak = self.cached, self.aside
        return block & ADDRESS, size, requested

    def release(self, block: Held, cached: bool = False) -> None:
        """Free what `hold` or `run` gave, and say again whether it is cached."""
        address, size, requested = block
        self._allocator.give(size << ADDRESS_BITS | address)
        self._allocator.allocated_bytes -= size
        self.requested -= requested
        self.cached -= size * cached

    def run(
        self,
        program: bytes,
        sizes: bytes,
        inputs: list[Held],
        out: tuple[int, ...],
    ) -> list[Held]:
        """Allocate and free as a program says; what is in the slots `out` then."""
        requests = array("q", sizes)
        slots: dict[int, Held] = {
            slot: block for slot, block in enumerate(inputs) if block is not None
        }
        moves = iter(array("q", program))
        for slot, index, is_cached in zip(moves, moves, moves, strict=True):
            if index != FREE:
                slots[slot] = self.hold(requests[index], bool(is_cached))
            elif slot in slots:
                self.release(slots.pop(slot), bool(is_cached))
        return [slots[slot] for slot in out]

    def free_blocks(self) -> tuple[Hashable, Hashable]:
        """Of the small pool and of the large one: equal where these are.

        Nothing else decides which block a request is given, so from equal free blocks (and equal
        blocks in use) equal requests lead to equal ones again.
        """
        return tuple(self._allocator.small.free), tuple(self._allocator.large.free)

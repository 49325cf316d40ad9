"""The memory of a device: its allocator, the bytes in use, and their peaks.

There are two implementations with the same methods: `PlainMemory`, and a compiled one
(`_memory.c`), because planning spends most of its time here. The compiled one exists where a C
compiler was present when duoka was installed; for type checkers it is a `PlainMemory`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence

from .allocator import ADDRESS, ADDRESS_BITS, CachingAllocator, ExpandablePool, rounded_bytes

CompiledMemory: Callable[..., PlainMemory] | None
try:
    from ._memory import Memory as CompiledMemory
except ImportError:  # not compiled at installation
    CompiledMemory = None

Held = tuple[int, int, int]
"""The block of a request: its address, its bytes, and the requested bytes, rounded to 512."""

FREE = -1


def new_memory(capacity_bytes: int | None, expandable: bool = False) -> PlainMemory:
    """Return the empty memory of a device, compiled if possible; None is unlimited capacity.

    `expandable` is True for expandable segments.
    """
    return (CompiledMemory or PlainMemory)(capacity_bytes, expandable)


def sizes_of(sizes: Sequence[int]) -> bytes:
    """Pack the sizes of a program's allocations, for `PlainMemory.run`."""
    return array("q", sizes).tobytes()


class PlainMemory:
    """The memory of a device; all numbers are bytes.

    `allocated` are the bytes of blocks in use, `requested` the bytes requested for these blocks,
    without unsplit rests. `cached` are the allocated bytes of KV caches or gradients, `aside` those
    of the optimizer, which the caller counts. `cached_at_peak` and `aside_at_peak` are the values
    at the `peak` of allocated bytes; `requested_peak` is the peak of requested bytes.
    """

    def __init__(self, capacity_bytes: int | None = None, expandable: bool = False) -> None:
        self._allocator = CachingAllocator(capacity_bytes, expandable=expandable)
        self.peak = self.requested = self.requested_peak = 0
        self.cached = self.cached_at_peak = self.aside = self.aside_at_peak = 0

    @property
    def allocated(self) -> int:
        """Bytes of blocks in use."""
        return self._allocator.allocated_bytes

    @property
    def max_reserved(self) -> int:
        """The peak of the bytes reserved from the device."""
        return self._allocator.max_reserved_bytes

    @property
    def is_pressed(self) -> bool:
        """True once cached segments were returned for lack of capacity."""
        return self._allocator.is_pressed

    def hold(self, num_bytes: int, cached: bool = False) -> Held:
        """Allocate a block; `cached` marks KV caches and gradients."""
        # `allocated` counts the whole block, `requested` the rounded request: 13.5 MiB served by a
        # free block of 14 MiB add 14 to `allocated` and 13.5 to `requested`. `requested` doesn't
        # depend on which blocks are free, so the search compares stages by its peak.
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
        """Free a block of `hold` or `run`; `cached` must be as in its allocation."""
        address, size, requested = block
        self._allocator.release(size << ADDRESS_BITS | address)
        self._allocator.allocated_bytes -= size
        self.requested -= requested
        self.cached -= size * cached

    def run(
        self, program: bytes, sizes: bytes, inputs: list[Held], out: tuple[int, ...]
    ) -> list[Held]:
        """Run a program's code with `inputs` in its first registers; return the blocks in `out`."""
        requests = array("q", sizes)
        registers: dict[int, Held] = {
            register: block for register, block in enumerate(inputs) if block is not None
        }
        code = iter(array("q", program))
        for register, index, is_cached in zip(code, code, code, strict=True):
            if index != FREE:
                registers[register] = self.hold(requests[index], bool(is_cached))
            elif register in registers:
                self.release(registers.pop(register), bool(is_cached))
        return [registers[register] for register in out]

    def free_blocks(self) -> tuple[Hashable, ...]:
        """Return the free blocks of the small and the large pool, for comparison.

        The free blocks alone determine which block serves a request; with expandable segments the
        unmapped runs do too, which are returned as well. So from equal free blocks (and equal
        blocks in use), equal requests lead to equal free blocks.
        """
        pools = self._allocator.small, self._allocator.large
        expandable = [pool for pool in pools if isinstance(pool, ExpandablePool)]
        unmapped = [tuple(sorted(pool.unmapped.items())) for pool in expandable]
        return (*(tuple(pool.free) for pool in pools), *unmapped)

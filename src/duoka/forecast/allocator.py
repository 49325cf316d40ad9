"""A model of CUDA's caching allocator: allocated and reserved bytes.

The rules are those of PyTorch's native CUDA allocator in its default configuration ("Memory
management" in the CUDA semantics notes): sizes are rounded up to 512 bytes; requests up to 1 MiB
are served from 2 MiB segments, larger requests below 10 MiB from 20 MiB segments, the rest from
segments rounded up to 2 MiB; the smallest free block that fits is taken and split; neighbours merge
when freed; if a new segment doesn't fit, all wholly free segments are returned to the device first.
Streams and expandable segments are not modelled; options that change rounding or splitting are
refused.

The virtual GPUs allocate through `CachingAllocator`. The forecast replays through it too, or
through the same algorithm in C (`_allocator.h`) where it was compiled; tests compare the two step
by step, so a forecast and a virtual run follow the same rules. This module knows nothing of torch.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort

from duoka.errors import UsageError

# Named in PyTorch's source (c10) kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc,
# kLargeBuffer and kRoundLarge.
ROUND_BYTES = 512
SMALL_REQUEST_BYTES = 2**20
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_REQUEST_BYTES = 10 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
SEGMENT_ROUND_BYTES = 2 * 2**20


_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_REFUSED_OPTIONS = (
    "max_split_size_mb", "large_segment_size_mb", "roundup_", "per_process_memory_fraction",
    "backend:cuda",
)  # fmt: skip


def refuse_options() -> None:
    """Raise UsageError if PyTorch's allocator has options under which forecasts would be wrong."""
    for variable in _VARIABLES:
        for option in os.environ.get(variable, "").replace(" ", "").split(","):
            if option.startswith(_REFUSED_OPTIONS):
                raise UsageError(
                    f"{variable} has {option[:60]!r}, which changes the allocator in a way that "
                    "the forecast doesn't model",
                    hint=f"remove it from {variable}; the plan keeps within the budgets without it",
                )


class OutOfCapacity(MemoryError):
    """Raised if the allocator can't reserve memory for a request.

    Not a `DuokaError`: the virtual GPU turns it into `torch.OutOfMemoryError`, the forecast into
    "does not fit".
    """

    def __init__(
        self,
        requested_bytes: int,
        capacity_bytes: int,
        allocated_bytes: int,
        reserved_bytes: int,
    ) -> None:
        super().__init__(f"{requested_bytes} bytes requested")
        self.requested_bytes = requested_bytes
        self.capacity_bytes = capacity_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


def rounded_bytes(num_bytes: int) -> int:
    """Return the bytes occupied by a request: at least 512, in multiples of 512."""
    return max(ROUND_BYTES, -(-num_bytes // ROUND_BYTES) * ROUND_BYTES)


def segment_bytes(rounded: int) -> int:
    """Return the bytes of the segment to reserve for a rounded request without a free block."""
    if rounded <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded < LARGE_REQUEST_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-rounded // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES


Block = int
"""A run of bytes, in use or free: its size, shifted by `ADDRESS_BITS`, and its address.

So blocks sort by size, then by address, in the order of the allocator's best-fit search; and
comparing, finding and storing a block are fast, which dominate the time of a replay.
"""

ADDRESS_BITS = 56
END_OF_ADDRESSES = 1 << ADDRESS_BITS  # memory beyond this address is refused in any case
ADDRESS = END_OF_ADDRESSES - 1


# A segment of the large pool, in MiB, after each request:
#
#   malloc 6       [ 6 used | 14 free ]          a new segment of 20, split
#   malloc 13.5    [ 6 used | 14 used ]          a rest of 0.5 isn't split: `least_rest` is above 1
#   free   6       [ 6 free | 14 used ]
#   malloc 8       [ 6 free | 14 used ]          6 is too small: a second segment of 20 is reserved
#   free   13.5    [ 20 free ]                   merged; wholly free, so it may be returned
#
# After the fourth request 22 MiB are allocated (21.5 of them requested), and 40 are reserved.
class SegmentPool:
    """The segments of one pool (small or large requests), and their free blocks.

    `free` has the free blocks, merged with their free neighbours, in order of size and address.
    `least_rest` is the smallest rest that is split off a block. The free blocks alone determine how
    later requests are served from existing segments.
    """

    __slots__ = ("_ends", "_least_rest", "_segments", "_starts", "free")

    def __init__(self, *, least_rest: int) -> None:
        self.free: list[Block] = []
        self._least_rest = least_rest
        self._segments: dict[int, int] = {}
        self._starts: dict[int, int] = {}  # of free blocks: size by address
        self._ends: dict[int, int] = {}  # of free blocks: address by end address

    def add_segment(self, address: int, size: int) -> None:
        """Add a new, wholly free segment, which must not be adjacent to another segment."""
        self._segments[address] = size
        self._starts[address], self._ends[address + size] = size, address
        insort(self.free, size << ADDRESS_BITS | address)

    def take(self, size: int) -> Block | None:
        """Take the smallest free block of at least `size` bytes, split if larger; None if none."""
        # Best fit: `free` is sorted by size, then address. A rest below `least_rest`, too small for
        # any request of this pool, stays with the block.
        free = self.free
        index = bisect_left(free, size << ADDRESS_BITS)
        if index == len(free):
            return None
        block = free.pop(index)
        address = block & ADDRESS
        rest = (block >> ADDRESS_BITS) - size
        del self._starts[address]
        if rest < self._least_rest:
            del self._ends[address + size + rest]
            return block
        behind = address + size
        insort(free, rest << ADDRESS_BITS | behind)
        self._starts[behind], self._ends[behind + rest] = rest, behind
        return size << ADDRESS_BITS | address

    def release(self, block: Block) -> None:
        """Free a block, and merge it with its free neighbours."""
        # The next neighbour starts where the block ends, the previous one ends where the block
        # starts. Both are found without a search, by their edges (Knuth's boundary tags). With
        # 0 ... 512 and 1024 ... 2048 free, a release of 512 ... 1024:
        #
        #   starts[1024] = 1024 (size)     the block grows to 512 ... 2048
        #   ends[512] = 0 (address)        the block grows to 0 ... 2048
        free, starts, ends = self.free, self._starts, self._ends
        address = block & ADDRESS
        end = address + (block >> ADDRESS_BITS)
        size = starts.pop(end, 0)
        if size:
            del free[bisect_left(free, size << ADDRESS_BITS | end)]
            end += size
        start_before = ends.pop(address, None)
        if start_before is not None:
            del free[bisect_left(free, (address - start_before) << ADDRESS_BITS | start_before)]
            address = start_before
        starts[address], ends[end] = end - address, address
        insort(free, (end - address) << ADDRESS_BITS | address)

    def drop_free_segments(self) -> int:
        """Return wholly free segments to the device; return the number of their bytes."""
        wholly = [
            (address, size)
            for address, size in self._segments.items()
            if self._starts.get(address) == size
        ]
        for address, size in wholly:
            del self._segments[address], self._starts[address], self._ends[address + size]
            del self.free[bisect_left(self.free, size << ADDRESS_BITS | address)]
        return sum(size for _, size in wholly)


class Allocation:
    """The block that serves a request of `malloc`."""

    __slots__ = ("block", "is_free")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.is_free = False

    @property
    def address(self) -> int:
        """The address of the first byte."""
        return self.block & ADDRESS

    @property
    def size(self) -> int:
        """Bytes of the block, at least the rounded request."""
        return self.block >> ADDRESS_BITS


class CachingAllocator:
    """The allocator of a device; without a capacity, memory ends at `END_OF_ADDRESSES`.

    `allocated_bytes` are in use by tensors; `reserved_bytes` are taken from the device, and include
    cached (free) blocks. The maxima are peaks since the start or the last `reset_peak`.
    `is_pressed` is True once a segment exceeded the capacity and cached segments were returned.
    Requests up to `SMALL_REQUEST_BYTES` are served from the `small` pool, larger ones from the
    `large` pool.

    Examples
    --------
    >>> allocator = CachingAllocator()
    >>> block = allocator.malloc(1000)
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (1024, 2097152)
    >>> allocator.free(block)
    >>> allocator.allocated_bytes, allocator.reserved_bytes
    (0, 2097152)
    """

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.is_pressed = False
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.max_allocated_bytes = 0
        self.max_reserved_bytes = 0
        self.small = SegmentPool(least_rest=ROUND_BYTES)
        self.large = SegmentPool(least_rest=SMALL_REQUEST_BYTES + ROUND_BYTES)
        self._next_address = 0

    def malloc(self, num_bytes: int) -> Allocation:
        """Allocate a block for a request of `num_bytes`."""
        allocation = Allocation(self.take(rounded_bytes(num_bytes)))
        self.allocated_bytes += allocation.size
        if self.allocated_bytes > self.max_allocated_bytes:
            self.max_allocated_bytes = self.allocated_bytes
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Free an allocation returned by `malloc`."""
        assert not allocation.is_free, "freed twice"
        allocation.is_free = True
        self.allocated_bytes -= allocation.size
        self.release(allocation.block)

    def take(self, size: int) -> Block:
        """Return a block for a rounded request, without counting it in `allocated_bytes`."""
        pool = self.small if size <= SMALL_REQUEST_BYTES else self.large
        block = pool.take(size)
        if block is None:
            self._reserve(pool, size)
            block = pool.take(size)
            assert block is not None, "a new segment holds what it was made for"
        return block

    def release(self, block: Block) -> None:
        """Free a block returned by `take`, without counting it in `allocated_bytes`."""
        # A block of the large pool is always larger than one of the small pool.
        is_small = block >> ADDRESS_BITS <= SMALL_REQUEST_BYTES
        (self.small if is_small else self.large).release(block)

    def has_room_for(self, segment: int) -> bool:
        """Return True if a new segment of `segment` bytes fits the capacity."""
        if self._next_address + segment > END_OF_ADDRESSES:
            return False
        return self.capacity_bytes is None or self.reserved_bytes + segment <= self.capacity_bytes

    def empty_cache(self) -> None:
        """Return every wholly free segment to the device."""
        for pool in (self.small, self.large):
            self.reserved_bytes -= pool.drop_free_segments()

    def reset_peak(self) -> None:
        """Reset both peaks to the current numbers of bytes."""
        self.max_allocated_bytes = self.allocated_bytes
        self.max_reserved_bytes = self.reserved_bytes

    def _reserve(self, pool: SegmentPool, size: int) -> None:
        """Reserve a segment for a rounded request, returning cached segments if necessary."""
        segment = segment_bytes(size)
        if not self.has_room_for(segment):
            self.is_pressed = True
            self.empty_cache()
            if not self.has_room_for(segment):
                limit = END_OF_ADDRESSES if self.capacity_bytes is None else self.capacity_bytes
                raise OutOfCapacity(size, limit, self.allocated_bytes, self.reserved_bytes)
        pool.add_segment(self._next_address, segment)
        # A gap keeps blocks of adjacent segments from merging.
        self._next_address += segment + ROUND_BYTES
        self.reserved_bytes += segment
        if self.reserved_bytes > self.max_reserved_bytes:
            self.max_reserved_bytes = self.reserved_bytes

"""A model of CUDA's caching allocator: allocated and reserved bytes.

The rules are those that PyTorch documents for its native CUDA allocator ("Memory management" in
the CUDA semantics notes) in its default configuration: sizes are rounded up to 512 bytes;
requests up to 1 MiB are served from 2 MiB segments, larger ones below 10 MiB from 20 MiB
segments, the rest from segments rounded up to 2 MiB; the smallest free block that fits is taken
and split; neighbours merge when freed; when a segment can't be had, all wholly free segments are
given back first. Streams and expandable segments are not modelled; options that round or split
otherwise are refused.

The virtual GPUs allocate through this class. The forecast replays through it too, or through the
same in C (`_allocator.h`) where there is a compiler; tests hold the two against each other step for
step, so a forecast and a virtual run can't disagree about the rules. It knows nothing of torch.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort

from duoka.errors import UsageError

# In PyTorch's source (c10): kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer
# and kRoundLarge.
ROUND_BYTES = 512
SMALL_REQUEST_BYTES = 2**20
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_REQUEST_BYTES = 10 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
SEGMENT_ROUND_BYTES = 2 * 2**20


_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_OTHERWISE = (
    "max_split_size_mb", "large_segment_size_mb", "roundup_", "per_process_memory_fraction",
    "backend:cuda",
)  # fmt: skip


def refuse_options() -> None:
    """Refuse options of PyTorch's allocator under which forecasts would be wrong."""
    for variable in _VARIABLES:
        for option in os.environ.get(variable, "").replace(" ", "").split(","):
            if option.startswith(_OTHERWISE):
                raise UsageError(
                    f"{variable} has {option[:60]!r}, which changes the allocator in a way that "
                    "the forecast doesn't model",
                    hint=f"remove it from {variable}; the plan keeps within the budgets without it",
                )


class OutOfCapacity(MemoryError):
    """Raised where the allocator can't reserve memory for a request.

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
    """Return the bytes to reserve from the device for a (rounded) request without a free block."""
    if rounded <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded < LARGE_REQUEST_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-rounded // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES


Block = int
"""A run of bytes, in use or free: its size, shifted by `ADDRESS_BITS`, and its address.

So blocks are ordered by size, then by address, as the allocator looks for them; and comparing,
finding and keeping one is as quick as it can be, which is what a replay's time goes into.
"""

ADDRESS_BITS = 56
END_OF_ADDRESSES = 1 << ADDRESS_BITS  # what would lie behind it is refused, capacity or none
ADDRESS = END_OF_ADDRESSES - 1


# A segment of the large pool, in MiB, from a request to the next:
#
#   malloc 6       [ 6 used | 14 free ]          a new segment of 20, split
#   malloc 13.5    [ 6 used | 14 used ]          a rest of 0.5 isn't split: `least_rest` is above 1
#   free   6       [ 6 free | 14 used ]
#   malloc 8       [ 6 free | 14 used ]          6 is too small: a further segment of 20
#   free   13.5    [ 20 free ]                   merged; wholly free, so it may be given back
#
# After the fourth line 22 MiB are allocated (21.5 of them requested), and 40 are reserved.
class SegmentPool:
    """The segments of a size class, and their free blocks.

    `free` has the free blocks, merged with their free neighbours, in order of size and address.
    Later requests depend on nothing else: two allocators with equal free blocks serve them alike.
    """

    __slots__ = ("_ends", "_least_rest", "_segments", "_starts", "free")

    def __init__(self, *, least_rest: int) -> None:
        self.free: list[Block] = []
        self._least_rest = least_rest
        self._segments: dict[int, int] = {}
        self._starts: dict[int, int] = {}  # of free blocks: address, size
        self._ends: dict[int, int] = {}  # of free blocks: address behind it, address

    def add_segment(self, address: int, size: int) -> None:
        """Take in a new segment, wholly free. Nothing may lie right before it or behind it."""
        self._segments[address] = size
        self._starts[address], self._ends[address + size] = size, address
        insort(self.free, size << ADDRESS_BITS | address)

    def take(self, size: int) -> Block | None:
        """Take the smallest free block of at least so many bytes, split, or return None."""
        # Best fit: `free` is sorted by size, then address. A rest too small for any request of this
        # pool stays with the block.
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
        """Take a block back, and merge it with its free neighbours."""
        # A free neighbour behind begins where the block ends, one before it ends where it begins.
        # Both are found without a search, by their edges (Knuth's boundary tags). With 0 to 512 and
        # 1024 to 2048 free, a release of 512 to 1024:
        #
        #   starts[1024] is 1024 bytes     the block grows to 512 ... 2048
        #   ends[512] begins at 0          and to 0 ... 2048: no two free blocks touch
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
        """Give wholly free segments back to the device, and return the number of their bytes."""
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
    """The block given to a request."""

    __slots__ = ("block", "is_free")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.is_free = False

    @property
    def address(self) -> int:
        """The address of its first byte."""
        return self.block & ADDRESS

    @property
    def size(self) -> int:
        """Occupied bytes, at least the rounded request."""
        return self.block >> ADDRESS_BITS


class CachingAllocator:
    """The allocator of a device; without a capacity nothing is refused below `END_OF_ADDRESSES`.

    `allocated_bytes` are in use by tensors; `reserved_bytes`, taken from the device, include what
    is cached. The maxima are peaks since the start or the last `reset_peak`. It `is_pressed` once
    the capacity was reached and cached segments were given back. Requests up to
    `SMALL_REQUEST_BYTES` are served from the `small` pool, others from the `large` one.

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
        """Allocate."""
        allocation = Allocation(self.take(rounded_bytes(num_bytes)))
        self.allocated_bytes += allocation.size
        if self.allocated_bytes > self.max_allocated_bytes:
            self.max_allocated_bytes = self.allocated_bytes
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Free an allocation of `malloc`."""
        assert not allocation.is_free, "freed twice"
        allocation.is_free = True
        self.allocated_bytes -= allocation.size
        self.release(allocation.block)

    def take(self, size: int) -> Block:
        """Return a block for a rounded request, counted as reserved and not as allocated."""
        pool = self.small if size <= SMALL_REQUEST_BYTES else self.large
        block = pool.take(size)
        if block is None:
            self._reserve(pool, size)
            block = pool.take(size)
            assert block is not None, "a new segment holds what it was made for"
        return block

    def release(self, block: Block) -> None:
        """Take back a block of `take`."""
        # A block of the large pool is always larger than one of the small pool.
        is_small = block >> ADDRESS_BITS <= SMALL_REQUEST_BYTES
        (self.small if is_small else self.large).release(block)

    def has_room_for(self, segment: int) -> bool:
        """Return True if so many more bytes can be reserved."""
        if self._next_address + segment > END_OF_ADDRESSES:
            return False
        return self.capacity_bytes is None or self.reserved_bytes + segment <= self.capacity_bytes

    def empty_cache(self) -> None:
        """Give every wholly free segment back to the device."""
        for pool in (self.small, self.large):
            self.reserved_bytes -= pool.drop_free_segments()

    def reset_peak(self) -> None:
        """Start both peaks again from the bytes in use."""
        self.max_allocated_bytes = self.allocated_bytes
        self.max_reserved_bytes = self.reserved_bytes

    def _reserve(self, pool: SegmentPool, size: int) -> None:
        segment = segment_bytes(size)
        if not self.has_room_for(segment):
            self.is_pressed = True
            self.empty_cache()
            if not self.has_room_for(segment):
                limit = END_OF_ADDRESSES if self.capacity_bytes is None else self.capacity_bytes
                raise OutOfCapacity(size, limit, self.allocated_bytes, self.reserved_bytes)
        pool.add_segment(self._next_address, segment)
        # Segments don't merge, so they don't touch.
        self._next_address += segment + ROUND_BYTES
        self.reserved_bytes += segment
        if self.reserved_bytes > self.max_reserved_bytes:
            self.max_reserved_bytes = self.reserved_bytes

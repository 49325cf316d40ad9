"""A model of CUDA's caching allocator: allocated and reserved bytes.

The rules are those of PyTorch's native CUDA allocator in its default configuration ("Memory
management" in the CUDA semantics notes): sizes are rounded up to 512 bytes; requests up to 1 MiB
are served from 2 MiB segments, larger requests below 10 MiB from 20 MiB segments, the rest from
segments rounded up to 2 MiB; the smallest free block that fits is taken and split; neighbours merge
when freed; if a new segment doesn't fit, all wholly free segments are returned to the device first.

With the option ``expandable_segments:True`` a pool is one range of addresses instead (PyTorch's
"Note [Expandable Segments]" in c10/cuda/CUDACachingAllocator.cpp): memory is mapped at its end in
pages of 2 MiB (small requests) or 20 MiB (larger ones), every rest is split off, and under pressure
the pages inside of free blocks are unmapped. Streams are not modelled; other options that change
rounding or splitting are refused.

The virtual GPUs allocate through `CachingAllocator`. The forecast replays through it too, or
through the same algorithm in C (`_allocator.h`, `_device.h`) where it was compiled; tests compare
the two step by step, so a forecast and a virtual run follow the same rules. This module knows
nothing of torch.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections.abc import Callable

from duoka.errors import UsageError
from duoka.hardware.gpu_generation import ALLOCATOR_CONFIGS

# Named in PyTorch's source (c10) kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc,
# kLargeBuffer and kRoundLarge.
ROUND_BYTES = 512
SMALL_REQUEST_BYTES = 2**20
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_REQUEST_BYTES = 10 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
SEGMENT_ROUND_BYTES = 2 * 2**20
# The addresses of an expandable segment are 9/8 of the device's memory, or of this without a limit.
MOST_EXPANDABLE_BYTES = 2**50

_REFUSED_OPTIONS = (
    "max_split_size_mb", "large_segment_size_mb", "roundup_", "per_process_memory_fraction",
    "backend:cuda",
)  # fmt: skip


def refuse_options() -> None:
    """Raise UsageError if PyTorch's allocator has options under which forecasts would be wrong."""
    for variable in ALLOCATOR_CONFIGS:
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
        self, requested_bytes: int, capacity_bytes: int, allocated_bytes: int, reserved_bytes: int
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

    `segments` has the segments' sizes by address, `free` the free blocks, merged with their free
    neighbours, in order of size and address. `least_rest` is the smallest rest that is split off a
    block. The free blocks alone determine how later requests are served from existing segments.
    """

    __slots__ = ("_ends", "_least_rest", "_starts", "free", "segments")

    def __init__(self, *, least_rest: int) -> None:
        self.free: list[Block] = []
        self._least_rest = least_rest
        self.segments: dict[int, int] = {}
        self._starts: dict[int, int] = {}  # of free blocks: size by address
        self._ends: dict[int, int] = {}  # of free blocks: address by end address

    def add_segment(self, address: int, size: int) -> None:
        """Add a new, wholly free segment, which must not be adjacent to another segment."""
        self.segments[address] = size
        self._starts[address], self._ends[address + size] = size, address
        insort(self.free, size << ADDRESS_BITS | address)

    def take(self, size: int) -> Block | None:
        """Take the smallest free block of at least `size` bytes, split if larger; None if none."""
        # Best fit: `free` is sorted by size, then address. A rest below `least_rest`, too small for
        # any request of this pool, stays with the block.
        free = self.free
        index = self._best_fit(size)
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

    def _best_fit(self, size: int) -> int:
        """Return the index of the free block to take; the number of blocks if none fits."""
        return bisect_left(self.free, size << ADDRESS_BITS)

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
            for address, size in self.segments.items()
            if self._starts.get(address) == size
        ]
        for address, size in wholly:
            del self.segments[address], self._starts[address], self._ends[address + size]
            del self.free[bisect_left(self.free, size << ADDRESS_BITS | address)]
        return sum(size for _, size in wholly)


# An expandable segment of the large pool, in MiB, after each request; pages are 20 MiB:
#
#   malloc 30      [ 30 used | 10 free | unmapped ... ]                     2 pages are mapped
#   malloc 15      [ 30 used | 15 used | 15 free | unmapped ... ]           10 free, 5 are missing
#   free   30      [ 30 free | 15 used | 15 free | unmapped ... ]
#   malloc 12      [ 12 used | 18 free | 15 used | 15 free | unmapped ... ] 15 free may yet expand
#   (pressure)     [ 12 used | 18 free | 15 used | 15 free | unmapped ... ] no page is wholly free
#   free   12      [ 30 free | 15 used | 15 free | unmapped ... ]
#   (pressure)     [ unmapped 20 | 10 free | 15 used | 15 free | unmapped ... ]
class ExpandablePool(SegmentPool):
    """The expandable segments of one pool: mostly one, of which memory is mapped page by page.

    `unmapped` has the sizes of the unmapped runs of addresses by their starts, multiples of
    `page_bytes`. A free block and the unmapped run behind it can become one larger block. A
    second segment is added if memory was unmapped so often that no run of addresses is long enough;
    it is assumed to be at higher addresses than the first, as the driver may decide otherwise.
    """

    __slots__ = ("page_bytes", "unmapped")

    def __init__(self, *, page_bytes: int) -> None:
        super().__init__(least_rest=ROUND_BYTES)
        self.page_bytes = page_bytes
        self.unmapped: dict[int, int] = {}

    def _best_fit(self, size: int) -> int:
        """Return the index of the free block to take, the smallest after its possible expansion."""
        index = super()._best_fit(size)
        while index + 1 < len(self.free) and self._expanded(index + 1) < self._expanded(index):
            index += 1
        return index

    def _expanded(self, index: int) -> int:
        """Return the bytes of a free block and of the unmapped run behind it."""
        size, address = self.free[index] >> ADDRESS_BITS, self.free[index] & ADDRESS
        return size + self.unmapped.get(address + size, 0)

    def find_expandable(self, size: int) -> int | None:
        """Return the lowest address with `size` free or unmapped bytes, at an unmapped run."""
        for run in sorted(self.unmapped):
            end = start = self._ends.get(run, run)
            while end < start + size and (more := self._starts.get(end) or self.unmapped.get(end)):
                end += more
            if end >= start + size:
                return start
        return None

    def map_pages(self, start: int, size: int, reserve: Callable[[int], bool]) -> bool:
        """Map pages until the free block at `start` is large enough; return False if too many.

        `reserve` takes bytes from the device. Pages that fit stay mapped if later ones don't.
        """
        while (free := self._starts.get(start, 0)) < size:
            run = self.unmapped[start + free]
            pages = -(-min(size - free, run) // self.page_bytes) * self.page_bytes
            if not reserve(pages):
                return False
            del self.unmapped[start + free]
            if pages < run:
                self.unmapped[start + free + pages] = run - pages
            self.release(pages << ADDRESS_BITS | start + free)
        return True

    def drop_free_segments(self) -> int:
        """Unmap all wholly free pages, drop wholly unmapped segments; return the unmapped bytes."""
        dropped = 0
        for block in list(self.free):
            size, address = block >> ADDRESS_BITS, block & ADDRESS
            start = -(-address // self.page_bytes) * self.page_bytes
            end = (address + size) // self.page_bytes * self.page_bytes
            if start < end:
                self.free.remove(block)
                del self._starts[address], self._ends[address + size]
                for rest, at in ((start - address, address), (address + size - end, end)):
                    if rest:
                        self.release(rest << ADDRESS_BITS | at)
                dropped += end - start
                # The run merges with its unmapped neighbours.
                end += self.unmapped.pop(end, 0)
                start = next((at for at, n in self.unmapped.items() if at + n == start), start)
                self.unmapped[start] = end - start
                if self.segments.get(start) == end - start:
                    del self.segments[start], self.unmapped[start]
        return dropped


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
    `large` pool. With `expandable`, segments are expandable.

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

    def __init__(self, capacity_bytes: int | None = None, *, expandable: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self.is_pressed = False
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.max_allocated_bytes = 0
        self.max_reserved_bytes = 0
        self.small = SegmentPool(least_rest=ROUND_BYTES)
        self.large = SegmentPool(least_rest=SMALL_REQUEST_BYTES + ROUND_BYTES)
        if expandable:
            self.small = ExpandablePool(page_bytes=SMALL_SEGMENT_BYTES)
            self.large = ExpandablePool(page_bytes=LARGE_SEGMENT_BYTES)
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

    def empty_cache(self) -> None:
        """Return every wholly free segment to the device."""
        for pool in (self.small, self.large):
            self.reserved_bytes -= pool.drop_free_segments()

    def reset_peak(self) -> None:
        """Reset both peaks to the current numbers of bytes."""
        self.max_allocated_bytes = self.allocated_bytes
        self.max_reserved_bytes = self.reserved_bytes

    def _reserve(self, pool: SegmentPool, size: int) -> None:
        """Reserve memory for a rounded request, returning cached memory if necessary."""
        if not self._extend(pool, size):
            self.is_pressed = True
            self.empty_cache()
            if not self._extend(pool, size):
                limit = END_OF_ADDRESSES if self.capacity_bytes is None else self.capacity_bytes
                raise OutOfCapacity(size, limit, self.allocated_bytes, self.reserved_bytes)

    def _extend(self, pool: SegmentPool, size: int) -> bool:
        """Reserve a segment or pages for a rounded request; return False if they don't fit."""
        if isinstance(pool, ExpandablePool):
            return self._map_pages(pool, size)
        segment = segment_bytes(size)
        end = self._next_address + segment
        if end > END_OF_ADDRESSES or not self._reserve_bytes(segment):
            return False
        pool.add_segment(self._next_address, segment)
        # A gap keeps blocks of adjacent segments from merging.
        self._next_address = end + ROUND_BYTES
        return True

    def _map_pages(self, pool: ExpandablePool, size: int) -> bool:
        """Map pages until `size` bytes are free in a row; return False if they don't fit."""
        start = pool.find_expandable(size)
        if start is None:
            memory = min(MOST_EXPANDABLE_BYTES, self.capacity_bytes or MOST_EXPANDABLE_BYTES)
            segment = -(-(memory + memory // 8) // pool.page_bytes) * pool.page_bytes
            start = self._next_address
            if size > segment or start + segment > END_OF_ADDRESSES:
                return False
            pool.segments[start] = pool.unmapped[start] = segment
            # The next segment is aligned to any page, and not adjacent.
            self._next_address += (segment // LARGE_SEGMENT_BYTES + 1) * LARGE_SEGMENT_BYTES
        return pool.map_pages(start, size, self._reserve_bytes)

    def _reserve_bytes(self, num_bytes: int) -> bool:
        """Count bytes as reserved; return False if they exceed the capacity."""
        reserved = self.reserved_bytes + num_bytes
        if self.capacity_bytes is not None and reserved > self.capacity_bytes:
            return False
        self.reserved_bytes = reserved
        self.max_reserved_bytes = max(reserved, self.max_reserved_bytes)
        return True

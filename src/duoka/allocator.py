"""A model of CUDA's caching allocator: which bytes are allocated, which stay reserved.

The rules are those that PyTorch documents for its native CUDA allocator ("Memory management" in
the CUDA semantics notes) in its default configuration: sizes are rounded up to 512 bytes;
requests up to 1 MiB are served from 2 MiB segments, larger ones below 10 MiB from 20 MiB
segments, the rest from segments rounded up to 2 MiB; the smallest free block that fits is taken
and split; neighbours merge when freed; when a segment can't be had, all wholly free segments are
given back first. Streams, expandable segments and the options of PYTORCH_CUDA_ALLOC_CONF are not
modelled.

Both the virtual GPUs (which allocate) and the forecast (which replays) use this one class, so a
forecast and a virtual run can't disagree about the rules. It knows nothing of torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort

ROUND_BYTES = 512
SMALL_REQUEST_BYTES = 2**20
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_REQUEST_BYTES = 10 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
SEGMENT_ROUND_BYTES = 2 * 2**20


class OutOfCapacity(MemoryError):
    """The allocator can't reserve what a request needs.

    Not a `DuokaError`: the virtual GPU turns it into `torch.OutOfMemoryError`, the forecast into
    "does not fit".
    """

    def __init__(self, requested_bytes: int, allocator: CachingAllocator) -> None:
        super().__init__(f"{requested_bytes} bytes requested")
        self.requested_bytes = requested_bytes
        self.capacity_bytes = allocator.capacity_bytes
        self.allocated_bytes = allocator.allocated_bytes
        self.reserved_bytes = allocator.reserved_bytes


class Allocation:
    """A block of a segment: in use, or free and waiting to be used again."""

    __slots__ = ("address", "following", "free", "preceding", "size", "small")

    def __init__(self, address: int, size: int, small: bool) -> None:
        self.address = address
        self.size = size
        self.small = small
        self.free = False
        self.preceding: Allocation | None = None
        self.following: Allocation | None = None


def rounded_bytes(num_bytes: int) -> int:
    """Bytes that a request occupies: at least 512, in multiples of 512."""
    return max(ROUND_BYTES, -(-num_bytes // ROUND_BYTES) * ROUND_BYTES)


def segment_bytes(rounded: int) -> int:
    """Bytes that are reserved from the device when no free block serves a (rounded) request."""
    if rounded <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if rounded < LARGE_REQUEST_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-rounded // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES


class _Pool:
    """The free blocks of one size class, ordered by size, then address."""

    __slots__ = ("blocks", "keys")

    def __init__(self) -> None:
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[int, Allocation] = {}

    def add(self, block: Allocation) -> None:
        insort(self.keys, (block.size, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Allocation) -> None:
        del self.keys[bisect_left(self.keys, (block.size, block.address))]
        del self.blocks[block.address]

    def take_best_fit(self, size: int) -> Allocation | None:
        index = bisect_left(self.keys, (size, 0))
        if index == len(self.keys):
            return None
        _, address = self.keys.pop(index)
        return self.blocks.pop(address)


class CachingAllocator:
    """One device's allocator.

    Parameters
    ----------
    capacity_bytes : int, optional
        The most that may be reserved. Without it nothing is refused.

    Attributes
    ----------
    allocated_bytes, reserved_bytes : int
        In use by tensors, and taken from the device. Reserved includes what is cached.
    max_allocated_bytes, max_reserved_bytes : int
        The peaks since the start or the last `reset_peak`.
    is_pressed : bool
        Whether the capacity was ever reached, and cached segments were given back.

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
        self._small = _Pool()
        self._large = _Pool()
        self._next_address = 0

    def malloc(self, num_bytes: int) -> Allocation:
        """Allocate.

        Raises
        ------
        OutOfCapacity
            If the request doesn't fit, even after every wholly free segment was given back.
        """
        size = rounded_bytes(num_bytes)
        small = size <= SMALL_REQUEST_BYTES
        pool = self._small if small else self._large
        block = pool.take_best_fit(size) or self._reserve(size, small)
        if block is None:
            self.is_pressed = True
            self.empty_cache()
            block = self._reserve(size, small)
            if block is None:
                raise OutOfCapacity(num_bytes, self)
        block.free = False
        remaining = block.size - size
        if remaining >= ROUND_BYTES if small else remaining > SMALL_REQUEST_BYTES:
            self._split(block, size, pool)
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.max_allocated_bytes:
            self.max_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Allocation) -> None:
        """Give a block back to its pool, merged with its free neighbours."""
        assert not block.free, "freed twice"
        self.allocated_bytes -= block.size
        block.free = True
        pool = self._small if block.small else self._large
        left, right = block.preceding, block.following
        if right is not None and right.free:
            pool.remove(right)
            _absorb(block, right)
        if left is not None and left.free:
            pool.remove(left)
            _absorb(left, block)
            block = left
        pool.add(block)

    def empty_cache(self) -> None:
        """Give every wholly free segment back to the device."""
        for pool in (self._small, self._large):
            for block in list(pool.blocks.values()):
                if block.preceding is None and block.following is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def reset_peak(self) -> None:
        """Start both peaks again from what is in use now."""
        self.max_allocated_bytes = self.allocated_bytes
        self.max_reserved_bytes = self.reserved_bytes

    def _reserve(self, size: int, small: bool) -> Allocation | None:
        segment = segment_bytes(size)
        if self.capacity_bytes is not None and self.reserved_bytes + segment > self.capacity_bytes:
            return None
        block = Allocation(self._next_address, segment, small)
        self._next_address += segment
        self.reserved_bytes += segment
        if self.reserved_bytes > self.max_reserved_bytes:
            self.max_reserved_bytes = self.reserved_bytes
        return block

    def _split(self, block: Allocation, size: int, pool: _Pool) -> None:
        rest = Allocation(block.address + size, block.size - size, block.small)
        rest.free = True
        rest.preceding, rest.following = block, block.following
        if block.following is not None:
            block.following.preceding = rest
        block.following = rest
        block.size = size
        pool.add(rest)


def _absorb(left: Allocation, right: Allocation) -> None:
    left.size += right.size
    left.following = right.following
    if right.following is not None:
        right.following.preceding = left

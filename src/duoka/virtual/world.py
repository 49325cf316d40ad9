"""Worlds of virtual GPUs, the storage blocks on them, and listeners.

A world is a few GPUs, each with an allocator and a device for its data. One world belongs to the
process (`set_gpus`); a thread may use another one inside a scope (`gpus`). A storage block is one
storage on one GPU: a tensor and its views share the block, and its memory is freed with the last of
these tensors. This module knows nothing of operators.
"""

from __future__ import annotations

import itertools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from duoka.base.units import format_bytes
from duoka.errors import VirtualDeviceError
from duoka.forecast.allocator import Allocation, CachingAllocator, OutOfCapacity
from duoka.hardware.gpu_generation import GpuGeneration

from .naming import virtual_device

UNLIMITED_BYTES = 2**50
"""The total that `mem_get_info` reports for a GPU without a capacity."""

_block_ids = itertools.count(1)


class Listener(Protocol):
    """A listener to every allocation, free and operation of a thread."""

    def allocated(self, gpu: VirtualGpu, storage_id: int, num_bytes: int) -> None:
        """Note an allocated storage of `num_bytes`, not rounded."""

    def freed(self, gpu: VirtualGpu, storage_id: int) -> None:
        """Note a freed storage."""

    def operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        """Note a finished ATen operation; tensors on virtual GPUs are `VirtualTensor`s."""


class Arbiter(Protocol):
    """Repairs operations with mixed devices, so that a run goes on and finds further faults."""

    def settle(
        self, error: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments moved to one virtual GPU, or raise `error`, a MixedDevicesError."""

    def bring_to_cpu(self, error: TypeError, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy on the CPU, or raise `error`: code needs the tensor's memory (numpy)."""


class _ThreadState(threading.local):
    """The state of a thread, with class attributes as defaults of new threads."""

    armed: bool = False
    world: World | None = None
    listener: Listener | None = None
    arbiter: Arbiter | None = None
    unknown_number: float | None = None  # returned for unknown numbers, see `known_values`
    failure: Exception | None = None  # the error of an operation in backward, see `operators`
    current_index: int = 0


thread = _ThreadState()


@contextmanager
def thread_state(**values: Any) -> Iterator[None]:
    """Set attributes of this thread's state inside the scope, and restore them at its end."""
    previous = {name: getattr(thread, name) for name in values}
    vars(thread).update(values)
    try:
        yield
    finally:
        vars(thread).update(previous)


# Both switches are torch's own and belong to one thread. ``torch.tensor(..., device="vgpu:0")``
# works only when new data is lifted to a device after it was built on the CPU; and backward must
# run in the calling thread, because a device guard written in Python knows one device only.
def arm() -> None:
    """Set both switches for this thread, unless set; they are undone only by `armed`."""
    if thread.armed:
        return
    torch._C._set_only_lift_cpu_tensors(True)
    torch._C._set_multithreading_enabled(False)
    thread.armed = True


@contextmanager
def armed() -> Iterator[None]:
    """Set both switches inside the scope, and restore them: CUDA's backward needs its threads."""
    lifts_cpu_alone = torch._C._only_lift_cpu_tensors()
    is_multithreaded = torch._C._is_multithreading_enabled()
    was_armed, thread.armed = thread.armed, False
    arm()
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts_cpu_alone)
        torch._C._set_multithreading_enabled(is_multithreaded)
        thread.armed = was_armed


class VirtualGpu:
    """A virtual GPU of a world.

    `data` is where backing tensors are: "cpu", "meta" (without values) or "even" (as "meta", but
    experts are chosen evenly). While `refuses` is True, an allocation beyond the capacity raises
    OutOfMemoryError; otherwise it sets `overflowed`, and removes the limit for good. The first
    matrix product allocates cuBLAS's workspace, and the first in backward another one.
    """

    __slots__ = (
        "_lock", "_pending", "_workspaces", "allocator", "data", "data_device", "device", "index",
        "meta", "overflowed", "refuses", "world",
    )  # fmt: skip

    def __init__(self, index: int, capacity_bytes: int | None, data: str, world: World) -> None:
        self.index = index
        expandable = world.generation.expandable_segments
        self.allocator = CachingAllocator(capacity_bytes, expandable=expandable)
        self.data = data
        self.meta = data in ("meta", "even")
        self.data_device = torch.device("meta" if self.meta else data)
        self.device = virtual_device(index)
        self.world = world
        self.refuses = True
        self.overflowed = False
        self._lock = threading.Lock()
        self._pending: deque[Allocation] = deque()
        self._workspaces: set[bool] = set()

    def __repr__(self) -> str:
        return f"Gpu(index={self.index}, data={self.data!r})"

    def malloc(self, num_bytes: int) -> Allocation | None:
        """Allocate memory; return None for 0 bytes, for which CUDA allocates nothing either."""
        if num_bytes == 0:
            return None
        with self._lock:
            self._free_pending()
            try:
                return self.allocator.malloc(num_bytes)
            except OutOfCapacity as error:
                if not self.refuses:
                    self.overflowed, self.allocator.capacity_bytes = True, None
                    return self.allocator.malloc(num_bytes)
                failure = error
        raise torch.OutOfMemoryError(self._out_of_memory_text(failure))

    def free(self, allocation: Allocation) -> None:
        """Free an allocation, now or at the next use of the allocator.

        The garbage collector may call this at any point, also while this thread is inside the
        allocator: then the allocation stays pending until the lock is taken again.
        """
        # Appending to a deque is atomic; the next holder of the lock frees all pending allocations.
        # Example: `malloc` holds the lock and makes a Python object, which starts a garbage
        # collection; that destroys a tensor in a reference cycle, and so calls `free` in this very
        # thread. Waiting for the lock would be a deadlock, and a reentrant lock would let `free`
        # change the allocator's lists while `malloc` is working on them.
        self._pending.append(allocation)
        if self._lock.acquire(blocking=False):
            try:
                self._free_pending()
            finally:
                self._lock.release()

    def charge(self, *sizes_bytes: int) -> None:
        """Allocate a kernel's temporary buffers and free them at once, which may raise the peak."""
        allocations = []
        listener = thread.listener
        try:
            for num_bytes in sizes_bytes:
                allocation = self.malloc(num_bytes)
                if allocation is not None:
                    storage_id = next(_block_ids)
                    allocations.append((allocation, storage_id))
                    if listener is not None:
                        listener.allocated(self, storage_id, num_bytes)
        finally:
            for allocation, storage_id in allocations:
                if listener is not None:
                    listener.freed(self, storage_id)
                self.free(allocation)

    def multiply(self, *, in_backward: bool) -> None:
        """Note a matrix product; the first one allocates a workspace for good (`GpuGeneration`)."""
        if in_backward not in self._workspaces:
            self.malloc(self.world.generation.workspace_bytes)
            self._workspaces.add(in_backward)

    def settle(self) -> CachingAllocator:
        """Free all pending allocations, and return the allocator."""
        with self._lock:
            self._free_pending()
        return self.allocator

    def empty_cache(self) -> None:
        """Release the segments that are wholly free."""
        with self._lock:
            self._free_pending()
            self.allocator.empty_cache()

    def _free_pending(self) -> None:
        while self._pending:
            self.allocator.free(self._pending.popleft())

    def _out_of_memory_text(self, failure: OutOfCapacity) -> str:
        """Return a text like CUDA's for an allocation beyond the capacity."""
        capacity, reserved = failure.capacity_bytes or 0, failure.reserved_bytes
        allocated = failure.allocated_bytes
        sizes = (failure.requested_bytes, capacity, max(0, capacity - reserved), reserved)
        requested, total, free, used = map(format_bytes, sizes)
        return (
            f"vgpu out of memory. Tried to allocate {requested}. GPU {self.index} has a total "
            f"capacity of {total} of which {free} is free. This process has {used} memory in use. "
            f"Of the allocated memory {format_bytes(allocated)} is allocated by PyTorch, and "
            f"{format_bytes(reserved - allocated)} is reserved by PyTorch but unallocated."
        )


# The accounting follows storages, as CUDA's does, because views keep memory alive:
#
#   x = torch.empty(1000, device="vgpu:0")    new storage, new block: 4000 B asked, 4096 allocated
#   y = x[10:]                                same storage, same block: nothing allocated
#   del x                                     y still refers to the block: nothing freed
#   del y                                     the last reference: the block's __del__ frees 4096 B
class StorageBlock:
    """A storage on a GPU, charged to its allocator during the life of its tensors.

    `unknown` is None until unknown values are written into a storage with known ones; then it is a
    meta tensor whose storage replaces the one with outdated values (see `known_values`).
    """

    __slots__ = (
        "__weakref__", "_allocation", "_key", "_unknown_key", "gpu", "id", "num_bytes", "storage",
        "unknown",
    )  # fmt: skip

    def __init__(self, gpu: VirtualGpu, storage: torch.UntypedStorage) -> None:
        # The attributes that `__del__` reads are set first: `malloc` may raise.
        self._allocation: Allocation | None = None
        self._key = self._unknown_key = 0
        self.num_bytes = storage.nbytes()
        self._allocation = gpu.malloc(self.num_bytes)
        self.gpu = gpu
        self.id = next(_block_ids)
        self.storage = storage
        self.unknown: torch.Tensor | None = None
        self._key = storage._cdata
        blocks_by_storage[self._key] = weakref.ref(self)
        listener = thread.listener
        if listener is not None and self._allocation is not None:
            listener.allocated(gpu, self.id, self.num_bytes)

    # Bound as a default, since module globals may be gone when the interpreter exits.
    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if _is_ending():
            return
        blocks_by_storage.pop(self._key, None)
        blocks_by_storage.pop(self._unknown_key, None)
        if self._allocation is not None:
            self._release()

    def recharge(self) -> None:
        """Charge the new size of a resized storage, allocated before the old one is freed."""
        num_bytes = self.storage.nbytes()
        if num_bytes == self.num_bytes:
            return
        allocation = self.gpu.malloc(num_bytes)
        if self._allocation is not None:
            self._release()
        self._allocation, self.num_bytes, self.id = allocation, num_bytes, next(_block_ids)
        if thread.listener is not None and allocation is not None:
            thread.listener.allocated(self.gpu, self.id, num_bytes)

    def forget(self) -> None:
        """Make a meta storage to replace the storage, after a write of unknown values."""
        self.unknown = torch.empty(self.num_bytes, dtype=torch.uint8, device="meta")
        self._unknown_key = self.unknown.untyped_storage()._cdata
        blocks_by_storage[self._unknown_key] = weakref.ref(self)

    @property
    def address(self) -> int:
        """A stand-in for the address: unique among live allocations, 0 for an empty storage."""
        if self._allocation is None:
            return 0
        return ((self.gpu.index + 1) << 44) + self._allocation.address

    def _release(self) -> None:
        """Free the allocation, and report that to the listener."""
        assert self._allocation is not None
        self.gpu.free(self._allocation)
        listener = thread.listener
        if listener is not None:
            listener.freed(self.gpu, self.id)


blocks_by_storage: dict[int, weakref.ref[StorageBlock]] = {}
"""The block of every live backing storage, by the storage's identity.

It finds results that share memory with an argument even where the operator's schema denies it.
"""


class World:
    """The virtual GPUs of a process or scope; a capacity of None means no limit."""

    def __init__(
        self, capacities_bytes: Sequence[int | None], data: str, generation: GpuGeneration
    ) -> None:
        self.generation = generation
        self.gpus = [
            VirtualGpu(index, capacity, data, self)
            for index, capacity in enumerate(capacities_bytes)
        ]

    def gpu(self, index: int) -> VirtualGpu:
        """Return one GPU by its index."""
        if not 0 <= index < len(self.gpus):
            raise RuntimeError(
                f"vgpu error: invalid device ordinal {index}: there are {len(self.gpus)} "
                "virtual GPUs (see duoka.virtual.set_gpus)"
            )
        return self.gpus[index]

    def memory_allocated(self, index: int) -> int:
        """Return the bytes allocated by tensors now."""
        return self.gpu(index).settle().allocated_bytes

    def max_memory_allocated(self, index: int) -> int:
        """Return the peak of the allocated bytes."""
        return self.gpu(index).settle().max_allocated_bytes

    def memory_reserved(self, index: int) -> int:
        """Return the bytes that the allocator has reserved now."""
        return self.gpu(index).settle().reserved_bytes

    def max_memory_reserved(self, index: int) -> int:
        """Return the peak of the reserved bytes."""
        return self.gpu(index).settle().max_reserved_bytes

    def reset_peak_memory_stats(self, index: int) -> None:
        """Reset both peaks to the bytes in use now."""
        self.gpu(index).settle().reset_peak()

    def mem_get_info(self, index: int) -> tuple[int, int]:
        """Return the free and total bytes of the device; reserved memory isn't free."""
        allocator = self.gpu(index).settle()
        total = allocator.capacity_bytes
        if total is None:
            total = UNLIMITED_BYTES
        return max(0, total - allocator.reserved_bytes), total

    def empty_cache(self) -> None:
        """Release the wholly free segments of every GPU."""
        for gpu in self.gpus:
            gpu.empty_cache()


def set_process_world(world: World) -> None:
    """Set the world for all threads that don't use another one."""
    global _process_world
    _process_world = world


_process_world: World | None = None


def active_world() -> World:
    """Return the world in which factories in this thread make tensors."""
    world = thread.world or _process_world
    if world is None:
        raise VirtualDeviceError(
            "there are no virtual GPUs", hint="call duoka.virtual.set_gpus([...]) first"
        )
    return world


def num_gpus() -> int:
    """Count the GPUs of the active world; 0 without a world."""
    world = thread.world or _process_world
    return 0 if world is None else len(world.gpus)


@contextmanager
def use_world(world: World) -> Iterator[World]:
    """Let factories in this thread use `world` inside the scope."""
    with thread_state(world=world, current_index=0):
        yield world


def observe(listener: Listener) -> AbstractContextManager[None]:
    """Report this thread's work on virtual GPUs to `listener`, inside the scope.

    In nested scopes only the innermost listener gets reports. A free is reported in the thread
    that frees, whichever thread allocated.
    """
    return thread_state(listener=listener)


def settled_by(arbiter: Arbiter | None) -> AbstractContextManager[None]:
    """Let `arbiter` repair this thread's mixed-device operations inside the scope, if given."""
    return thread_state(arbiter=arbiter)

"""Data of a recorded step: an allocation trace for each block.

A trace lists the allocations, frees and reads of storages. Every storage has an id, which says
where it was allocated; frees and reads refer to storages by this id. Three blocks in step ``s``::

    block 0, embedding     block 1, layer                    block 2, layer
    alloc  (s, 0, 0)       read   (s, 0, 0)                  read   (s, 1, 2)
                           alloc  (s, 1, 0)  temporary       alloc  (s, 2, 0)
                           alloc  (s, 1, 1)  KV cache        ...
                           alloc  (s, 1, 2)  output          free   (s, 1, 2)
                           free   (s, 1, 0)
                           free   (s, 0, 0)

Storage ``(s, 1, 1)`` is still live after the step: it is retained, and a later step frees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from duoka import virtual

AllocId = tuple[int, int, int]
"""The allocation of a storage: step, block, and number of the allocation in the block's trace."""


@dataclass(slots=True)
class RecordedTrace:
    """The trace of a pass through a block: sizes in bytes, and storages by their ids.

    In `events`, None stands for the next allocation of `sizes`, an id for a free. `reads` are the
    bytes of arguments made by other blocks. `live_through` are the reads that were passed only to a
    container of the block, for a later block: they are live while this block runs, but unused by
    it. `retained` are the numbers of allocations that outlive the step, `slots` the order of the
    storages retained by earlier steps. `matmul_at` is the number of events before the first matrix
    product, or None without one; `sampling_at` that before a token is sampled. `moved_bytes` are
    bytes read and written by kernels, `host_bytes` and `host_flops` the work of the host.
    """

    sizes: list[int] = field(default_factory=list)
    events: list[AllocId | None] = field(default_factory=list)
    reads: dict[AllocId, int] = field(default_factory=dict)
    live_through: set[AllocId] = field(default_factory=set)
    retained: tuple[int, ...] = ()
    slots: dict[AllocId, int] = field(default_factory=dict)
    matmul_at: int | None = None
    sampling_at: int | None = None
    flops: int = 0
    moved_bytes: int = 0
    launches: int = 0
    host_bytes: int = 0
    host_flops: int = 0

    def add_host_work(self, num_bytes: int, flops: int, launches: int, moved_bytes: int) -> None:
        """Add the work for experts on the host; see `op_costs.count_host_work`."""
        self.host_bytes += num_bytes
        self.host_flops += flops
        self.launches += launches
        self.moved_bytes += moved_bytes

    def ids(self) -> Iterator[AllocId]:
        """Yield the ids of the storages freed or read in the trace."""
        yield from (storage for storage in self.events if storage is not None)
        yield from self.reads


@dataclass(slots=True)
class RecordedPass:
    """A pass over the model: the trace of each block.

    `model_blocks[block]` is the block whose trace stands for this block: another block for a stub,
    otherwise the block itself. No rule is fitted to the trace of a stub.
    """

    traces: list[RecordedTrace]
    model_blocks: list[int]
    step: int

    def is_like(self, other: RecordedPass) -> bool:
        """Return True if every block has the same number of events in both passes."""
        pairs = zip(self.traces, other.traces, strict=True)
        return all(len(trace.events) == len(same.events) for trace, same in pairs)


class RecordedMicroBatch(NamedTuple):
    """The recorded forward and backward pass of a micro-batch."""

    forward: RecordedPass
    backward: RecordedPass


class PassLog:
    """The traces of the current pass, and the ids of all live storages that were recorded."""

    def __init__(self) -> None:
        self.step = -1
        self.traces: list[RecordedTrace] = []
        self.ids: dict[int, AllocId] = {}

    def id_of(self, tensor: Any) -> AllocId | None:
        """Return the id of a tensor's storage; None if no recorded step has allocated it."""
        is_virtual = isinstance(tensor, virtual.VirtualTensor)
        return self.ids.get(tensor.storage_id) if is_virtual else None

    def adopt(self, tensor: virtual.VirtualTensor, block: int, number: int) -> None:
        """Give a tensor made by a stub the id of an allocation of the stubbed block."""
        self.ids[tensor.storage_id] = (self.step, block, number)

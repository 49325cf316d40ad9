"""The parts of a recorded step: an allocation trace for each block.

A trace is a def-use trace of storages. Every storage has an id, which says where it was allocated;
frees and reads refer to storages by this id. Of three blocks in step ``s``::

    block 0, embedding     block 1, layer                    block 2, layer
    alloc  (s, 0, 0)       read   (s, 0, 0)                  read   (s, 1, 2)
                           alloc  (s, 1, 0)  temporary       alloc  (s, 2, 0)
                           alloc  (s, 1, 1)  KV cache        ...
                           alloc  (s, 1, 2)  output          free   (s, 1, 2)
                           free   (s, 1, 0)
                           free   (s, 0, 0)

Storage ``(s, 1, 1)`` is alive after the step: it is retained, and a later step frees it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from duoka import virtual

AllocId = tuple[int, int, int]
"""Where a storage was allocated: the step, the block, the number of the allocation in its trace."""


@dataclass(slots=True)
class RecordedTrace:
    """The trace of a pass through a block: sizes in bytes, and storages by their ids.

    Of the `events`, None is the next allocation and an id is a free. `live_through` are the reads
    that only a container of the block was given, for a later block: they are alive while this block
    runs, and it doesn't use them. `slots` are the positions of the block's retained storages.
    """

    sizes: list[int] = field(default_factory=list)
    events: list[AllocId | None] = field(default_factory=list)
    reads: dict[AllocId, int] = field(default_factory=dict)
    live_through: set[AllocId] = field(default_factory=set)
    retained: tuple[int, ...] = ()
    slots: dict[AllocId, int] = field(default_factory=dict)
    matmul_at: int | None = None
    flops: int = 0
    moved_bytes: int = 0
    launches: int = 0

    def ids(self) -> Iterator[AllocId]:
        """Yield the storages freed and read in the trace."""
        yield from (storage for storage in self.events if storage is not None)
        yield from self.reads


@dataclass(slots=True)
class RecordedPass:
    """A pass over the model: the trace of each block.

    `model_blocks` has for a stubbed block the number of the block whose trace holds for it, and for
    any other block its own number. No rule is fitted to the trace of a stub.
    """

    traces: list[RecordedTrace]
    model_blocks: list[int]
    step: int

    def is_like(self, other: RecordedPass) -> bool:
        """Return True if every block has as many events in both passes."""
        pairs = zip(self.traces, other.traces, strict=True)
        return all(len(trace.events) == len(same.events) for trace, same in pairs)


class PassLog:
    """The traces of the current pass, and the ids of all live storages."""

    def __init__(self) -> None:
        self.step = -1
        self.traces: list[RecordedTrace] = []
        self.ids: dict[int, AllocId] = {}

    def id_of(self, tensor: Any) -> AllocId | None:
        """Return the id of a tensor's storage, or None for a tensor from outside of all steps."""
        is_virtual = isinstance(tensor, virtual.VirtualTensor)
        return self.ids.get(tensor.storage_id) if is_virtual else None

    def adopt(self, tensor: virtual.VirtualTensor, block: int, number: int) -> None:
        """Give a stub's output the id of an allocation of its block."""
        self.ids[tensor.storage_id] = (self.step, block, number)

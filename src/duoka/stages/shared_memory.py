"""Channels between processes of a machine, through memory that all of them map.

A tensor is copied to its place there, and a few bytes on a socket notify the receiver. (Over gloo a
small tensor takes some ten times as long: its threads have to wake first.)
"""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Sequence
from itertools import accumulate, combinations
from math import prod
from multiprocessing.connection import Connection
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .channels import LocalChannel, TensorMessage
from .route import Route

_ALIGNMENT = 64


class Notes(NamedTuple):
    """The seconds that a process has computed, and at its end the peaks of its device's memory."""

    busy_seconds: float = 0.0
    allocated_bytes: int = 0
    reserved_bytes: int = 0


# For 2 processes, 2 steps, and transfers t0, t1 of 100 and 64 bytes:
#
#     byte 0    line of process 0 │ line of process 1      notes and heartbeat, 64 bytes each
#     128       t0 of even steps, 128 bytes │ t1, 64
#     320       t0 of odd steps, 128 bytes │ t1, 64        up to 512
#
# t1 of step 5 is at 256 + (5 % 2) * 192 = 448.
class SharedMemory:
    """Memory for the transfers between processes of several steps in flight.

    Each transfer has a place for each of `num_steps`; a step uses the places of its number modulo
    `num_steps`. The object can be sent to a process that has the file open, too; the memory is
    freed when all of them are gone.
    """

    def __init__(self, largest: Route, num_steps: int, num_processes: int) -> None:
        sizes = (
            prod(transfer.shape.sizes) * transfer.shape.dtype.itemsize
            for transfer in largest.transfers
        )
        rounded = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        # At its beginning each process has a line for its notes and its heartbeat.
        start = num_processes * _ALIGNMENT
        self._num_processes = num_processes
        self._num_steps = num_steps
        self._offsets = list(accumulate(rounded, initial=start))
        self.descriptor = os.memfd_create("duoka-stages")
        os.ftruncate(self.descriptor, start + num_steps * (self._offsets[-1] - start))
        self._map()

    def _map(self) -> None:
        self._bytes = mmap.mmap(self.descriptor, 0)
        shape = self._num_processes, _ALIGNMENT // 8
        self._lines = np.ndarray(shape, np.float64, buffer=self._bytes)

    def __getstate__(self) -> dict[str, object]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_bytes", "_lines")}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._map()

    def place(self, message: TensorMessage, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the place of a message, as a tensor."""
        begin, end = self._offsets[message.transfer], self._offsets[message.transfer + 1]
        assert prod(sizes) * dtype.itemsize <= end - begin, "larger than the largest step's"
        part = message.micro_batch % self._num_steps * (self._offsets[-1] - self._offsets[0])
        flat = torch.frombuffer(self._bytes, dtype=dtype, count=prod(sizes), offset=begin + part)
        return flat.view(sizes)

    def note(self, rank: int, notes: Notes) -> None:
        """Publish the notes of a process."""
        self._lines[rank, :3] = notes

    def notes(self) -> list[Notes]:
        """Return the notes of all processes, by rank."""
        return [Notes(line[0], *map(int, line[1:3])) for line in self._lines.tolist()]

    def beat(self, rank: int, number: int) -> None:
        """Show that a process is alive, by a changing number."""
        self._lines[rank, 3] = number

    def beats(self) -> list[int]:
        """Return the last number of each process, by rank."""
        return [int(line[3]) for line in self._lines.tolist()]

    def close(self) -> None:
        """Close the file; mapped memory stays."""
        os.close(self.descriptor)


def connect(number: int) -> list[list[int]]:
    """Make sockets between processes; return for each process its ends by rank, -1 for itself."""
    ranks = list(combinations(range(number), 2))
    pairs = [socket.socketpair() for _ in ranks]  # closed by themselves where one of them fails
    ends = [[-1] * number for _ in range(number)]
    for (rank, peer), pair in zip(ranks, pairs, strict=True):
        ends[rank][peer], ends[peer][rank] = (end.detach() for end in pair)
    return ends


class SharedMemoryChannel:
    """A channel between processes of a machine; see `channels.Channel`.

    `waited_seconds` adds up the waiting for other processes.

    Parameters
    ----------
    memory : SharedMemory
    sockets : sequence of int
        This process's of `connect`.
    ranks : sequence of int
        The process that has each stage.
    device : torch.device
        This process's.
    """

    def __init__(
        self,
        memory: SharedMemory,
        sockets: Sequence[int],
        ranks: Sequence[int],
        device: torch.device,
    ) -> None:
        self.waited_seconds = 0.0
        self._memory = memory
        self._peers = [Connection(end) if end >= 0 else None for end in sockets]
        self._ranks = ranks
        self._device = device
        self._local = LocalChannel([device] * len(ranks))
        self._arrived: set[TensorMessage] = set()

    def send(self, message: TensorMessage, tensor: Tensor) -> None:
        """See `Channel`."""
        peer = self._peers[self._ranks[message.receiver]]
        if peer is None:
            self._local.send(message, tensor)
            return
        # The receiver reads the place only after the message, which is sent when the copy is done.
        if tensor.numel():
            self._memory.place(message, tuple(tensor.shape), tensor.dtype).copy_(tensor)
        peer.send(tuple(message))

    def receive(self, message: TensorMessage, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Channel`; raise EOFError or OSError where the other process is gone."""
        peer = self._peers[self._ranks[message.sender]]
        if peer is None:
            return self._local.receive(message, sizes, dtype)
        begin = time.perf_counter()
        while message not in self._arrived:
            self._arrived.add(TensorMessage(*peer.recv()))
        self.waited_seconds += time.perf_counter() - begin
        self._arrived.remove(message)
        if not prod(sizes):
            return torch.empty(sizes, dtype=dtype, device=self._device)
        # Never the place itself, which the sender will write to again.
        return self._memory.place(message, sizes, dtype).to(self._device, copy=True)

"""Channels between processes of one machine, through memory that all of them map.

A tensor is copied to its slot in the shared memory, and a few bytes on a socket notify the
receiver. (Over gloo a small tensor takes about ten times as long: its threads must wake up first.)

On CUDA the memory is pinned and copies are asynchronous: the sender goes on to launch its next
step, while a thread waits for the copy and notifies the receiver.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, combinations
from math import prod
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .channels import LocalChannel, TensorMessage
from .route import Route

_ALIGNMENT = 64
Call = Callable[[], object]


class Notes(NamedTuple):
    """A process's seconds of computing so far and, at its end, its device's peak memory."""

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
    """Memory for the transfers between processes, with several steps in flight.

    Each transfer of the route `largest` has `num_steps` slots; a step uses the slot of its number
    modulo `num_steps`. The object can be pickled to a process that has inherited the descriptor.
    The memory is freed when the last process has closed and unmapped it.
    """

    def __init__(self, largest: Route, num_steps: int, num_processes: int) -> None:
        sizes = (
            prod(transfer.shape.sizes) * transfer.shape.dtype.itemsize
            for transfer in largest.transfers
        )
        rounded = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        # The memory begins with one line per process, for its notes and its heartbeat.
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
        """Return the slot of a message, as a tensor of these sizes in the shared memory."""
        begin, end = self._offsets[message.transfer], self._offsets[message.transfer + 1]
        assert prod(sizes) * dtype.itemsize <= end - begin, "larger than the largest step's"
        # The slots of earlier step numbers, modulo `num_steps`, come before.
        part = message.micro_batch % self._num_steps * (self._offsets[-1] - self._offsets[0])
        flat = torch.frombuffer(self._bytes, dtype=dtype, count=prod(sizes), offset=begin + part)
        return flat.view(sizes)

    def pin(self) -> None:
        """Pin the memory in this process, so that copies between it and a GPU are asynchronous."""
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(
            int(cudart.cudaHostRegister(self._lines.ctypes.data, len(self._bytes), 0))
        )

    def note(self, rank: int, notes: Notes) -> None:
        """Write the notes of a process, for all other processes to read."""
        self._lines[rank, :3] = notes

    def note_busy(self, rank: int, seconds: float) -> None:
        """Write the seconds of computing among the notes of a process."""
        self._lines[rank, 0] = seconds

    def notes(self) -> list[Notes]:
        """Return the notes of all processes, by rank."""
        return [Notes(line[0], *map(int, line[1:3])) for line in self._lines.tolist()]

    def beat(self, rank: int, number: int) -> None:
        """Write a process's heartbeat: a number that changes while the process is alive."""
        self._lines[rank, 3] = number

    def beats(self) -> list[int]:
        """Return the last heartbeat of each process, by rank."""
        return [int(line[3]) for line in self._lines.tolist()]

    def close(self) -> None:
        """Close the file descriptor; the memory stays mapped."""
        os.close(self.descriptor)


def connect(number: int) -> list[list[int]]:
    """Connect `number` processes in pairs; return the sockets of each by peer, -1 for itself."""
    ranks = list(combinations(range(number), 2))
    pairs = [socket.socketpair() for _ in ranks]  # closed automatically if one of them fails
    ends = [[-1] * number for _ in range(number)]
    for (rank, peer), pair in zip(ranks, pairs, strict=True):
        ends[rank][peer], ends[peer][rank] = (end.detach() for end in pair)
    return ends


# The host launches the kernels and copies of step 1 while those of step 0 still run:
#
#     main thread   launch 0, copy 0, event 0 │ launch 1, copy 1, event 1 │ …
#     GPU                    kernels of 0         copy 0   kernels of 1
#     this thread   wait for event 0 ─────────────────▶ notify │ wait for event 1 …
class _Notifier:
    """Calls functions after the copies before them, in a thread of its own, one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._entries: SimpleQueue[tuple[torch.cuda.Event, Sequence[Call]]] = SimpleQueue()
        self._error: Exception | None = None
        self.on_error: Callable[[Exception], object] | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, calls: Sequence[Call]) -> None:
        """Queue functions, to be called after all work that is now queued on the device.

        Raises the error of an earlier function.
        """
        if self._error is not None:
            raise self._error
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self._entries.put((event, calls))

    def _run(self) -> None:
        # Otherwise waiting for an event may start CUDA on GPU 0, which takes memory there.
        torch.cuda.set_device(self._device)
        while True:
            event, calls = self._entries.get()
            try:
                event.synchronize()
                for call in calls:
                    call()
            except Exception as error:  # a lost GPU or process: the main thread raises it, too
                if self.on_error is not None:
                    self.on_error(error)
                self._error = error


class SharedMemoryChannel:
    """A channel between processes of a machine; see `channels.Channel`.

    `waited_seconds` is the total time spent waiting for other processes.

    Parameters
    ----------
    memory : SharedMemory
    sockets : sequence of int
        This process's sockets, as `connect` returns them.
    ranks : sequence of int
        The rank of the process that has each stage.
    device : torch.device
        The device of this process.
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
        self._notifier, self._unsent = None, list[Call]()
        if device.type == "cuda":
            memory.pin()
            self._notifier = _Notifier(device)

    def send(self, message: TensorMessage, tensor: Tensor) -> None:
        """See `Channel`."""
        peer = self._peers[self._ranks[message.receiver]]
        if peer is None:
            self._local.send(message, tensor)
            return
        # The receiver reads the slot only after this message, sent when the copy is complete.
        if tensor.numel():
            slot = self._memory.place(message, tuple(tensor.shape), tensor.dtype)
            slot.copy_(tensor, non_blocking=True)
        if self._notifier is None:
            peer.send(tuple(message))
        else:
            self._unsent.append(partial(peer.send, tuple(message)))

    def report_errors(self, on_error: Callable[[Exception], object]) -> None:
        """Call a function, in a thread, with each error of a copy that was to be sent."""
        if self._notifier is not None:
            self._notifier.on_error = on_error

    def after_sends(self, call: Call) -> None:
        """Call a function when all tensors sent so far have been copied; perhaps in a thread.

        On CUDA tensors are sent by this call, or before the channel waits for one, by one event.
        """
        if self._unsent:
            self._notify(call)
        else:
            call()

    def _notify(self, *calls: Call) -> None:
        """Notify the receivers of all tensors sent so far when they have been copied, then call."""
        assert self._notifier is not None, "tensors of other devices are sent at once"
        self._notifier.put((*self._unsent, *calls))
        self._unsent.clear()

    def receive(self, message: TensorMessage, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Channel`; raise EOFError or OSError if the other process has ended."""
        peer = self._peers[self._ranks[message.sender]]
        if peer is None:
            return self._local.receive(message, sizes, dtype)
        if self._unsent:
            self._notify()
        begin = time.perf_counter()
        while message not in self._arrived:
            self._arrived.add(TensorMessage(*peer.recv()))
        self.waited_seconds += time.perf_counter() - begin
        self._arrived.remove(message)
        if not prod(sizes):
            return torch.empty(sizes, dtype=dtype, device=self._device)
        # A copy, since the sender will write to the slot again.
        slot = self._memory.place(message, sizes, dtype)
        return slot.to(self._device, copy=True, non_blocking=True)

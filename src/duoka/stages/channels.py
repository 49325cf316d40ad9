"""Channels carry activations and gradients between stages, in a process or by torch.distributed.

Between processes a tensor goes through the host's memory, by gloo. This works between any two GPUs
and takes no GPU memory. On CUDA the memory is pinned and copies are asynchronous: a process goes on
to launch its next pass, and sends a tensor when its copy has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from duoka.runtime import devices
from duoka.runtime.dispatch.copies import carry

_MOST_TRANSFERS = 2**12


class TensorMessage(NamedTuple):
    """The identity of a sent tensor: transfer `transfer` of a micro-batch, or its gradient.

    The tensor goes from stage `source` to stage `target`, its gradient back from target to source.
    """

    source: int
    target: int
    transfer: int
    micro_batch: int
    is_gradient: bool

    @property
    def sender(self) -> int:
        """The sending stage."""
        return self.target if self.is_gradient else self.source

    @property
    def receiver(self) -> int:
        """The receiving stage."""
        return self.source if self.is_gradient else self.target


class Channel(Protocol):
    """Carries tensors between stages."""

    def send(self, message: TensorMessage, tensor: Tensor) -> None:
        """Send a tensor, without waiting for the receiver."""

    def receive(self, message: TensorMessage, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Wait for a tensor, and return it on the receiver's device."""


class LocalChannel:
    """A channel between stages in this process, each on its device."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._messages: dict[TensorMessage, Tensor] = {}

    def send(self, message: TensorMessage, tensor: Tensor) -> None:
        """See `Channel`. The receiver gets a copy, since either stage may write to its tensor."""
        device = self._devices[message.receiver]
        self._messages[message] = (
            carry(tensor, device) if tensor.device != device else tensor.clone()
        )

    def receive(self, message: TensorMessage, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Channel`."""
        return self._messages.pop(message)


# The host launches the kernels and copies of the next pass while those of the last one still run.
# It looks for copies that have ended whenever it sends another tensor, and waits for all of them
# before it waits for another process:
#
#     host   forward 0, copy 0 │ forward 1, copy 1 │ forward 2, copy 2, send 0 │ send 1, 2; receive
#     GPU            kernels of 0      copy 0   kernels of 1       copy 1   kernels of 2   copy 2
class ProcessChannel:
    """A channel between processes; `waited_seconds` is the total wait for other processes.

    Parameters
    ----------
    ranks : sequence of int
        The rank of the process that has each stage.
    device : torch.device
        The device of this process.
    """

    def __init__(self, ranks: Sequence[int], device: torch.device) -> None:
        self._ranks = ranks
        self.waited_seconds = 0.0
        self._device = device
        self._local = LocalChannel([device] * len(ranks))
        # Copies to buffers on the host that may still run, and what sends each buffer.
        self._copies: list[tuple[torch.cuda.Event | None, Tensor, Callable[[Tensor], Any]]] = []
        self._pending: list[tuple[Any, Tensor]] = []

    def send(self, message: TensorMessage, tensor: Tensor) -> None:
        """See `Channel`."""
        rank = self._ranks[message.receiver]
        if rank == dist.get_rank():
            self._local.send(message, tensor)
            return
        buffer = devices.empty_host(tensor.shape, tensor.dtype, self._device)
        buffer.copy_(tensor, non_blocking=True)
        send = partial(dist.isend, dst=rank, tag=_tag(message))
        self._copies.append((devices.record_event(self._device), buffer, send))
        self._pending = [entry for entry in self._pending if not entry[0].is_completed()]
        self._send_copied()

    def _send_copied(self, *, waits: bool = False) -> None:
        """Begin to send all tensors whose copies have ended; with `waits` wait for the copies."""
        while self._copies and (waits or devices.has_ended(self._copies[0][0])):
            event, buffer, send = self._copies.pop(0)
            devices.wait(event)
            # gloo reads `buffer` after this returns: `_pending` keeps the buffer until then.
            self._pending.append((send(buffer), buffer))

    def receive(self, message: TensorMessage, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Channel`."""
        rank = self._ranks[message.sender]
        if rank == dist.get_rank():
            return self._local.receive(message, sizes, dtype)
        buffer = devices.empty_host(sizes, dtype, self._device)
        arrival: Any = dist.irecv(buffer, rank, tag=_tag(message))
        self._send_copied(waits=True)
        begin = time.perf_counter()
        arrival.wait()
        self.waited_seconds += time.perf_counter() - begin
        return buffer.to(self._device, non_blocking=True)

    def flush(self) -> None:
        """Wait until all sent tensors have arrived."""
        self._send_copied(waits=True)
        begin = time.perf_counter()
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()
        self.waited_seconds += time.perf_counter() - begin


def _tag(message: TensorMessage) -> int:
    """Return a number that identifies a message within a step."""
    number = message.micro_batch * _MOST_TRANSFERS + message.transfer
    return 2 * number + message.is_gradient

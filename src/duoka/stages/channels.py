"""Channels carry activations and gradients between stages, in a process or by torch.distributed.

Between processes a tensor goes through the host's memory, and gloo: that works between any two
GPUs, takes none of their memory, and a micro-batch's hidden states are few bytes beside the work of
a stage on them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from duoka.runtime.dispatch.copies import carry

_MOST_TRANSFERS = 2**12


class TensorMessage(NamedTuple):
    """The address of a tensor: a transfer from source to target, or its gradient coming back."""

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
        """Wait for a tensor, and return the tensor on the receiver's device."""


class LocalChannel:
    """A channel between stages in this process, each on its device."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._messages: dict[TensorMessage, Tensor] = {}

    def send(self, message: TensorMessage, tensor: Tensor) -> None:
        """See `Channel`. A copy, since either side may write to its own."""
        device = self._devices[message.receiver]
        self._messages[message] = (
            carry(tensor, device) if tensor.device != device else tensor.clone()
        )

    def receive(self, message: TensorMessage, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Channel`."""
        return self._messages.pop(message)


class ProcessChannel:
    """A channel between processes; `waited_seconds` adds up the waiting for other processes.

    Parameters
    ----------
    ranks : sequence of int
        The process of each stage.
    device : torch.device
        This process's.
    """

    def __init__(self, ranks: Sequence[int], device: torch.device) -> None:
        self._ranks = ranks
        self.waited_seconds = 0.0
        self._device = device
        self._local = LocalChannel([device] * len(ranks))
        self._pending: list[tuple[Any, Tensor]] = []

    def send(self, message: TensorMessage, tensor: Tensor) -> None:
        """See `Channel`."""
        rank = self._ranks[message.receiver]
        if rank == dist.get_rank():
            self._local.send(message, tensor)
            return
        # gloo sends out of `host` later: `_pending` holds it until then.
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        host.copy_(tensor)
        self._pending = [entry for entry in self._pending if not entry[0].is_completed()]
        self._pending.append((dist.isend(host, rank, tag=_tag(message)), host))

    def receive(self, message: TensorMessage, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Channel`."""
        rank = self._ranks[message.sender]
        if rank == dist.get_rank():
            return self._local.receive(message, sizes, dtype)
        host = torch.empty(sizes, dtype=dtype)
        begin = time.perf_counter()
        dist.recv(host, rank, tag=_tag(message))
        self.waited_seconds += time.perf_counter() - begin
        return host.to(self._device)

    def flush(self) -> None:
        """Wait until all sent tensors have arrived."""
        begin = time.perf_counter()
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()
        self.waited_seconds += time.perf_counter() - begin


def _tag(message: TensorMessage) -> int:
    """Return a number that identifies a message within a step."""
    place = message.micro_batch * _MOST_TRANSFERS + message.transfer
    return 2 * place + message.is_gradient

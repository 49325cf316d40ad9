"""Measuring: what one GPU does in a second, and what goes between two places."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import linear

from duoka.runtime.devices import can_pin

from .timing import Call, best_rate, median_seconds

_MIB = 2**20
_WIDTH = 4096
_LARGEST_MATRIX = 16384
_LARGEST_BYTES = 1024 * _MIB
_LARGEST_COPY_BYTES = 256 * _MIB
_SMALL_BYTES = 4096


def reading(name: str, dtype: torch.dtype) -> float:
    """Bytes of a matrix that go through its product with a single row, per second."""
    row = torch.ones((1, _WIDTH), dtype=dtype, device=name)

    def make(size: int) -> tuple[Call, float]:
        matrix = torch.ones((size // _WIDTH // dtype.itemsize, _WIDTH), dtype=dtype, device=name)
        return (lambda: linear(row, matrix)), matrix.nbytes

    return best_rate(make, _doubled(_MIB, _LARGEST_BYTES), name)


def multiplying(name: str, dtype: torch.dtype) -> float:
    """Operations of a product of square matrices, per second."""

    def make(size: int) -> tuple[Call, float]:
        one, other = (torch.ones((size, size), dtype=dtype, device=name) for _ in range(2))
        return (lambda: one @ other), 2.0 * size**3

    return best_rate(make, _doubled(256, _LARGEST_MATRIX), name)


def launching(name: str) -> float:
    """Seconds of one small operation among many."""
    small = torch.zeros(8, device=name)
    return median_seconds(lambda: small.add_(1), name)


def from_host(name: str, *, pinned: bool) -> float | None:
    """Bytes per second out of the host's memory; None where such memory can't be had."""
    return _with_host(name, pinned=pinned, to_device=True)


def to_host(name: str, *, pinned: bool) -> float | None:
    """Bytes per second into the host's memory; None where such memory can't be had."""
    return _with_host(name, pinned=pinned, to_device=False)


def crossing(source: str, target: str) -> tuple[float, float]:
    """Bytes per second from one device to another, and what each tensor takes besides."""
    small = [_bytes(_SMALL_BYTES, each) for each in (source, target)]
    latency = median_seconds(lambda: small[1].copy_(small[0], non_blocking=True), source, target)

    def make(size: int) -> tuple[Call, float]:
        here, there = _bytes(size, source), _bytes(size, target)
        return (lambda: there.copy_(here, non_blocking=True)), size

    rate = best_rate(make, _doubled(_MIB, _LARGEST_COPY_BYTES), source, target)
    return rate, latency


def _with_host(name: str, *, pinned: bool, to_device: bool) -> float | None:
    if pinned and not can_pin(name):
        return None

    def make(size: int) -> tuple[Call, float]:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        device = _bytes(size, name)
        source, target = (host, device) if to_device else (device, host)
        return (lambda: target.copy_(source, non_blocking=pinned)), size

    return best_rate(make, _doubled(_MIB, _LARGEST_COPY_BYTES), name)


def _bytes(size: int, name: str) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=name)


def _doubled(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2

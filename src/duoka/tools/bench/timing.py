"""Timing: the median seconds of a call on a device, with enough of them to be told apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable

import torch

from duoka.errors import FleetError
from duoka.runtime import devices

Call = Callable[[], object]

_WARM_SECONDS = 0.05
_ROUND_SECONDS = 0.02
_ROUNDS = 5
_LONG_ENOUGH_SECONDS = 3e-3


def median_seconds(call: Call, *names: str) -> float:
    """Seconds of one call among many of its kind, the median of a few rounds."""
    started, calls = time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - started < _WARM_SECONDS:
        call()
        _finish(names)
        calls += 1
    once = _round(call, 1, names)
    repeats = max(1, min(1000, round(_ROUND_SECONDS / max(once, 1e-6))))
    return statistics.median(_round(call, repeats, names) / repeats for _ in range(_ROUNDS))


def best_rate(
    make: Callable[[int], tuple[Call, float]], sizes: Iterable[int], *names: str
) -> float:
    """Work per second at the first size whose call is long enough, or the largest that fits."""
    found: tuple[Call, float] | None = None
    for size in sizes:
        try:
            call, work = make(size)
            _round(call, 1, names)
            seconds = _round(call, 1, names)
        except torch.OutOfMemoryError:
            break
        found = call, work
        if seconds >= _LONG_ENOUGH_SECONDS:
            break
    if found is None:
        raise too_small(names[0])
    call, work = found
    return work / median_seconds(call, *names)


def too_small(name: str) -> FleetError:
    """What is raised where a GPU hasn't memory enough to measure anything."""
    return FleetError(
        f"{name} has too little free memory to measure anything",
        hint="end what uses it, or name other GPUs",
    )


def _round(call: Call, repeats: int, names: Iterable[str]) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _finish(names)
    return time.perf_counter() - start


def _finish(names: Iterable[str]) -> None:
    for name in names:
        devices.synchronize(name)

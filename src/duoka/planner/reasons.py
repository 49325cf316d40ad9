"""Reasons: why a plan is as it is, as sentences that it keeps."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from duoka.base.units import format_bytes, format_count
from duoka.forecast.workload import Workload
from duoka.hardware.fleet import Fleet

from .constraints import Constraints
from .device_map import find_device
from .limits import reserves


def number_reason(used: int, given: int, first: str, *, is_limited: bool) -> Iterator[str]:
    """Why not all devices are used, where as few as possible were looked for.

    `first` is the first one that is, and `is_limited` says whether modules had demands on them.
    """
    if used == 1 and given > 1:
        yield f"One GPU suffices: {first} holds all of it, and nothing crosses between GPUs."
    elif used < given:
        fewer = "no single one holds" if used == 2 else f"no {used - 1} of them hold"
        pinned = " with what is demanded of its modules" if is_limited else ""
        yield f"{used} of {given} GPUs are needed; {fewer} the workload{pinned}."


def demand_reasons(constraints: Constraints, fleet: Fleet, used: Collection[str]) -> Iterator[str]:
    """What was demanded, and obeyed. What stays free on devices in use stands beside them."""
    if constraints.strategy == "balanced":
        yield "Every GPU is used, and the fullest has as large a share free as can be."
    if constraints.strategy == "sequential":
        yield "The GPUs are filled in the order given, each as far as it goes before the next."
    if constraints.pins:
        pins = [f"{name} on {find_device(at, fleet)}" for name, at in constraints.pins]
        yield f"As pinned: {', '.join(pins)}."
    if constraints.uncut and len(used) > 1:
        yield f"As asked, nothing is cut at {', '.join(constraints.uncut)}."
    for name, size in reserves(constraints, fleet).items():
        if name not in used:
            yield f"As asked, {format_bytes(size)} of {name} were to stay free; it isn't used."


def offload_reason(num_modules: int, num_bytes: int, seconds: float | None) -> Iterator[str]:
    """What lies in the host's memory, and what that costs, where offloading was asked for."""
    if not num_modules:
        yield "Nothing is offloaded: all weights fit the GPUs."
    else:
        took = f"about {seconds:.2g} s" if seconds else "how long that takes isn't known"
        yield (
            f"The weights of {format_count(num_modules, 'module')} stay in the host's memory, "
            f"{format_bytes(num_bytes)}; with less there nothing fits. All of that goes over PCIe "
            f"for each token: {took}."
        )


def chunk_reason(asked: Workload, chosen: Workload) -> Iterator[str]:
    """Why the prompt runs in chunks, where that wasn't asked for."""
    chunk = chosen.prefill_chunk_tokens
    if asked.prefill_chunk_tokens == "auto" and chunk is not None:
        yield f"The prompt runs in chunks of {chunk} tokens: whole, it needs more memory."

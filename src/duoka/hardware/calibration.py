"""Calibration: what was measured on GPUs, kept on disk by kind of GPU, driver and torch.

One file holds all that was measured under one version of the driver and of torch; other versions
have other files. What can't be read, or was changed by anything but duoka, counts as not measured.
It measures nothing itself, and knows nothing of torch. The devices and links of a fleet are as fast
as they were measured, where they were.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from duoka.base.files import cache_directory, read_text, write_whole
from duoka.base.serialization import from_dict, parse_json_object, to_dict
from duoka.base.units import MIB
from duoka.errors import FormatError

from .device import RESERVE_BYTES, Device, Link

_VERSION = 5
_MOST_BYTES = 2**22
_LEAST_MARGIN_BYTES = 64 * MIB
_MARGIN_SHARE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """What was measured on GPUs of one kind, as NVML calls it; None where it couldn't be.

    `memory_bytes` is all that it has: two kinds may share a name. `overhead_bytes` is what a
    process holds there outside torch's allocator, after it has generated. The memory's speed is
    that of the product of a matrix with a single row, as decoding mostly does; FLOPs are of square
    matrices in 16 and 32 bit, `launch_seconds` a small model's decode step by the launches that its
    profile counts. The last is from the host's pinned memory.
    """

    product: str
    memory_bytes: int
    overhead_bytes: int
    memory_bytes_per_second: float
    flops_per_second: float
    float32_flops_per_second: float
    launch_seconds: float
    host_bytes_per_second: float | None

    @property
    def reserve_bytes(self) -> int:
        """What is kept out of a budget: the overhead, and an eighth of it more, at least 64 MiB.

        Kernels that weren't met while it was measured are loaded when they are.
        """
        margin = max(self.overhead_bytes // _MARGIN_SHARE, _LEAST_MARGIN_BYTES)
        return -(-(self.overhead_bytes + margin) // MIB) * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """What was measured from one GPU to another, known by their UUIDs."""

    source: str
    target: str
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """All that was measured under one version of the driver and of torch."""

    driver: str
    torch: str
    gpus: tuple[GpuFigures, ...] = ()
    links: tuple[LinkFigures, ...] = ()

    def of_product(self, product: str, memory_bytes: int | None) -> GpuFigures | None:
        """What was measured on GPUs of this name; the memory decides between two kinds of it."""
        alike = [figures for figures in self.gpus if figures.product == product]
        if memory_bytes is None or not alike:
            return alike[0] if len(alike) == 1 else None
        nearest = min(alike, key=lambda kind: abs(kind.memory_bytes - memory_bytes))
        # Drivers keep a little of it for themselves, one more than the other.
        close = abs(nearest.memory_bytes - memory_bytes) * 16 < memory_bytes
        return nearest if close else None

    def joined(self, newer: Calibration) -> Calibration:
        """The same with what was measured later in the place of what it was measured again for."""
        again = {(figures.product, figures.memory_bytes) for figures in newer.gpus}
        linked = {(figures.source, figures.target) for figures in newer.links}
        gpus = (
            figures for figures in self.gpus if (figures.product, figures.memory_bytes) not in again
        )
        links = (
            figures for figures in self.links if (figures.source, figures.target) not in linked
        )
        return replace(newer, gpus=(*gpus, *newer.gpus), links=(*links, *newer.links))


def torch_version() -> str:
    """The version of torch, without importing it; empty where it isn't installed."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return ""


def path_for(driver: str) -> Path:
    """Where what is measured under this driver and the installed torch is kept."""
    key = hashlib.sha256(json.dumps([_VERSION, driver, torch_version()]).encode()).hexdigest()
    return cache_directory() / "calibration" / f"{key[:32]}.json"


def find(driver: str) -> Calibration:
    """What was measured under this driver and the installed torch; empty where nothing was."""
    nothing = Calibration(driver=driver, torch=torch_version())
    try:
        content = read_text(path_for(driver), most_bytes=_MOST_BYTES)
        result = from_dict(Calibration, parse_json_object(content, "the calibration"))
    except (OSError, ValueError, FormatError):
        return nothing
    return result if (result.driver, result.torch) == (driver, nothing.torch) else nothing


def keep(measured: Calibration) -> Path:
    """Keep what was measured, beside what was measured before; whole or not at all."""
    path = path_for(measured.driver)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(to_dict(find(measured.driver).joined(measured))))
    return path


def reserve_bytes(figures: GpuFigures | None) -> int:
    """What is kept out of a budget."""
    return RESERVE_BYTES if figures is None else figures.reserve_bytes


def with_figures(device: Device, figures: GpuFigures | None) -> Device:
    """The device as fast as it was measured; what it keeps out of its budget isn't changed."""
    if figures is None:
        return device
    names = ["memory_bytes_per_second", "flops_per_second", "float32_flops_per_second"]
    names += ["launch_seconds", "reserve_bytes"]
    from_host = figures.host_bytes_per_second
    return replace(
        device,
        memory_bytes_per_second=figures.memory_bytes_per_second,
        flops_per_second=figures.flops_per_second,
        float32_flops_per_second=figures.float32_flops_per_second,
        launch_seconds=figures.launch_seconds,
        host_bytes_per_second=device.host_bytes_per_second if from_host is None else from_host,
        measured=(*names, *(() if from_host is None else ("host_bytes_per_second",))),
    )


def with_links(
    links: Iterable[Link], uuids: Mapping[str, str], measured: Calibration
) -> tuple[Link, ...]:
    """The links, those that were measured as fast as that was; with the UUIDs of the devices."""
    known = {(link.source, link.target): link for link in links}
    names = {uuid: name for name, uuid in uuids.items()}
    for figures in measured.links:
        source, target = names.get(figures.source), names.get(figures.target)
        if source is not None and target is not None:
            known[source, target] = Link(
                source=source,
                target=target,
                bytes_per_second=figures.bytes_per_second,
                latency_seconds=figures.latency_seconds,
                measured=True,
            )
    return tuple(known.values())

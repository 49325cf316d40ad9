"""Calibration: measured speeds and overhead of GPUs and the host, cached by driver and torch.

One file has all measurements under one version of the driver and of torch. An invalid or unreadable
file counts as no measurement. `tools.bench.calibrate` measures; this module stores the figures and
applies them to the devices and links of a fleet.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from duoka.base.files import cache_directory, read_text, write_whole
from duoka.base.requirements import installed_version
from duoka.base.serialization import OMIT_DEFAULT, from_dict, parse_json_object, to_dict
from duoka.base.units import MIB
from duoka.errors import FormatError

from .device import GRAPHS_BYTES, Device, Link

_VERSION = 5
_MOST_BYTES = 2**22
_LEAST_MARGIN_BYTES = 64 * MIB
_MARGIN_SHARE = 8
_MEASURED = (
    *("memory_bytes_per_second", "flops_per_second", "float32_flops_per_second"),
    *("launch_seconds", "reserve_bytes", "host_bytes_per_second"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """Measured figures of one product, by NVML's name.

    - `memory_bytes`: the whole memory, because two products may have the same name
    - `overhead_bytes`: memory of a process outside torch's allocator, after generation
    - `memory_bytes_per_second`: rate of a matrix product with a single row, as in decoding
    - `flops_per_second`, `float32_flops_per_second`: rates with square matrices, in 16 and 32 bit
    - `launch_seconds`: time of a small model's decode step, divided by its kernel launches
    - `host_bytes_per_second`: rate of copies from pinned memory; None if it can't be pinned
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
        """Bytes to reserve outside the budget: the overhead, plus an eighth or at least 64 MiB.

        This margin is for kernels that are loaded after the measurement. `GRAPHS_BYTES` are added,
        since the overhead is measured without CUDA graphs.
        """
        # 500 MiB of overhead get a margin of 64 MiB, 800 MiB one of 100 MiB.
        margin = max(self.overhead_bytes // _MARGIN_SHARE, _LEAST_MARGIN_BYTES)
        return -(-(self.overhead_bytes + margin + GRAPHS_BYTES) // MIB) * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFigures:
    """Measured figures of the link from one GPU to another, both by UUID."""

    source: str
    target: str
    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigures:
    """Measured figures of the host.

    - `memory_bytes`: the size of its memory, because machines may share the cache
    - `memory_bytes_per_second`: rate of a matrix product with a single row, as in decoding, with
      `threads` threads, torch's number
    """

    memory_bytes: int
    memory_bytes_per_second: float
    threads: int

    def is_of(self, memory_bytes: int) -> bool:
        """Return True if the figures may be those of a host with this size of memory."""
        return _is_near(self.memory_bytes, memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """All figures that were measured under one version of the driver and of torch.

    Without a driver, as on a machine without a GPU, `driver` is "" and only `host` is measured.
    """

    driver: str
    torch: str
    gpus: tuple[GpuFigures, ...] = ()
    links: tuple[LinkFigures, ...] = ()
    host: HostFigures | None = field(default=None, metadata=OMIT_DEFAULT)

    def of_product(self, product: str, memory_bytes: int | None) -> GpuFigures | None:
        """Find the figures of a product; its memory decides between products of the same name.

        None if no product of this name and approximate memory was measured.
        """
        namesakes = [figures for figures in self.gpus if figures.product == product]
        if memory_bytes is None or not namesakes:
            return namesakes[0] if len(namesakes) == 1 else None
        nearest = min(namesakes, key=lambda kind: abs(kind.memory_bytes - memory_bytes))
        return nearest if _is_near(nearest.memory_bytes, memory_bytes) else None

    # Figures are keyed by product and memory, links by both UUIDs: a later calibration of some GPUs
    # replaces their figures and keeps all others.
    def joined(self, newer: Calibration) -> Calibration:
        """Return the calibration with newer figures, which replace those of the same devices."""
        gpus = {(gpu.product, gpu.memory_bytes): gpu for gpu in (*self.gpus, *newer.gpus)}
        links = {(link.source, link.target): link for link in (*self.links, *newer.links)}
        host = newer.host or self.host
        return replace(newer, gpus=tuple(gpus.values()), links=tuple(links.values()), host=host)


def _is_near(measured_bytes: int, memory_bytes: int) -> bool:
    """Return True for equal memories: the reported size varies, because a part is reserved."""
    return abs(measured_bytes - memory_bytes) * 16 < memory_bytes


def torch_version() -> str:
    """Return torch's version without importing it; "" if torch isn't installed."""
    return installed_version("torch") or ""


def path_for(driver: str) -> Path:
    """Return the path of the file for this driver's version and the installed torch."""
    key = hashlib.sha256(json.dumps([_VERSION, driver, torch_version()]).encode()).hexdigest()
    return cache_directory() / "calibration" / f"{key[:32]}.json"


def read_calibration(driver: str) -> Calibration:
    """Read the calibration for this driver's version and the installed torch.

    It has no figures if there is no valid file.
    """
    nothing = Calibration(driver=driver, torch=torch_version())
    try:
        content = read_text(path_for(driver), most_bytes=_MOST_BYTES)
        result = from_dict(Calibration, parse_json_object(content, "the calibration"))
    except (OSError, ValueError, FormatError):
        return nothing
    return result if (result.driver, result.torch) == (driver, nothing.torch) else nothing


def keep_calibration(measured: Calibration) -> Path:
    """Add figures to the file of their driver and torch; return its path."""
    path = path_for(measured.driver)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(to_dict(read_calibration(measured.driver).joined(measured))))
    return path


def with_figures(device: Device, figures: GpuFigures | None) -> Device:
    """Return the device with measured speeds; unchanged for None. The reserve is not changed."""
    if figures is None:
        return device
    measured = tuple(name for name in _MEASURED if getattr(figures, name) is not None)
    speeds: dict[str, Any] = {name: getattr(figures, name) for name in measured}
    del speeds["reserve_bytes"]
    return replace(device, **speeds, measured=measured)


def with_links(
    links: Iterable[Link], uuids: Mapping[str, str], measured: Calibration
) -> tuple[Link, ...]:
    """Return the links with measured speeds where known; `uuids` maps device names to UUIDs."""
    by_pair = {(link.source, link.target): link for link in links}
    names = {uuid: name for name, uuid in uuids.items()}
    for figures in measured.links:
        if figures.source in names and figures.target in names:
            source, target = names[figures.source], names[figures.target]
            by_pair[source, target] = Link(
                **{**to_dict(figures), "source": source, "target": target}, measured=True
            )
    return tuple(by_pair.values())

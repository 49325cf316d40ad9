"""How fast bytes go between two GPUs: by NVLink, or over PCIe through the host.

What a connector can carry is stated by its standard; what a copy gets is less, by the shares
below, which come from published runs of `p2pBandwidthLatencyTest` (of NVIDIA's cuda-samples) and
were not measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, TypeVar

from .device import Link

End = TypeVar("End")

# Bytes per second of one lane in one direction: the base specifications of PCI-SIG, transfers per
# second times the share that the encoding leaves (8b/10b, from 3.0 on 128b/130b, in 6.0 flits of
# 242 bytes in 256).
_LANE_BYTES_PER_SECOND = {
    1: 2.5e9 * 8 / 10 / 8,
    2: 5e9 * 8 / 10 / 8,
    3: 8e9 * 128 / 130 / 8,
    4: 16e9 * 128 / 130 / 8,
    5: 32e9 * 128 / 130 / 8,
    6: 64e9 * 242 / 256 / 8,
}
# Without peer access a copy goes through the host's memory: 37 of 63 GB/s on PCIe 5.0
# (github.com/NVIDIA/nccl/issues/1264), 22 of 31.5 GB/s on 4.0 (…/issues/814).
_HOST_SHARE = 0.6
# 376 of 450 GB/s on an H100 (…/issues/1264).
_NVLINK_SHARE = 0.8
# From pinned memory 12.2 of 15.8 GB/s on PCIe 3.0 (github.com/mpicbg-scicomp/gearshifft/pull/82),
# 25 of 31.5 on 4.0 (github.com/ZaidQureshi/bam/issues/54).
_PINNED_SHARE = 0.77
# 11 to 20 µs through the host, 1.8 to 2.3 µs by NVLink
# (github.com/NVIDIA/cuda-samples/issues/230; …/nccl/issues/1127).
_HOST_LATENCY_SECONDS = 15e-6
_NVLINK_LATENCY_SECONDS = 2e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way from one GPU to another, in either direction."""

    kind: Literal["NVLink", "PCIe"]
    bytes_per_second: float
    latency_seconds: float


def by_nvlink(bytes_per_second: float) -> Way:
    """The way over NVLinks that carry this much together, in one direction."""
    return Way(
        kind="NVLink",
        bytes_per_second=_NVLINK_SHARE * bytes_per_second,
        latency_seconds=_NVLINK_LATENCY_SECONDS,
    )


def through_host(*ends: tuple[int | None, int | None]) -> Way | None:
    """The way over PCIe, as fast as the slower end."""
    speeds = [
        _LANE_BYTES_PER_SECOND.get(generation or 0, 0.0) * (lanes or 0)
        for generation, lanes in ends
    ]
    if min(speeds) <= 0:
        return None
    return Way(
        kind="PCIe",
        bytes_per_second=_HOST_SHARE * min(speeds),
        latency_seconds=_HOST_LATENCY_SECONDS,
    )


def from_host(generation: int | None, lanes: int | None) -> float | None:
    """Bytes per second out of the host's pinned memory; None when the connector is unknown."""
    speed = _LANE_BYTES_PER_SECOND.get(generation or 0, 0.0) * (lanes or 0)
    return _PINNED_SHARE * speed or None


def ways_between(
    named: Iterable[tuple[str, End]], way: Callable[[End, End], Way | None]
) -> Iterator[tuple[str, str, Way]]:
    """The pairs of names whose ends have a known way between them, and that."""
    for (first, one), (second, other) in combinations(named, 2):
        between = way(one, other)
        if between is not None:
            yield first, second, between


def links_of(ways: Iterable[tuple[str, str, Way]]) -> Iterator[Link]:
    """A link for each direction of a way."""
    for first, second, way in ways:
        for source, target in ((first, second), (second, first)):
            yield Link(
                source=source,
                target=target,
                bytes_per_second=way.bytes_per_second,
                latency_seconds=way.latency_seconds,
            )

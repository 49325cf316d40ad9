"""Links between two GPUs: NVLink, or PCIe through the host.

A connector's rate is that of its standard. A copy achieves a share of the rate, for which the
constants below are estimates from published runs of `p2pBandwidthLatencyTest` (NVIDIA's
cuda-samples).
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


@dataclass(frozen=True, slots=True)
class Way:
    """The connection between two GPUs, equally fast in both directions."""

    kind: Literal["NVLink", "PCIe"]
    bytes_per_second: float
    latency_seconds: float


def by_nvlink(bytes_per_second: float) -> Way:
    """Return the connection by NVLinks whose rates in one direction add up to this rate."""
    return Way("NVLink", _NVLINK_SHARE * bytes_per_second, _NVLINK_LATENCY_SECONDS)


def through_host(*ends: tuple[int | None, int | None]) -> Way | None:
    """Return the connection by PCIe, as fast as the slower of the two ends.

    An end is (generation, lanes). None if a speed is unknown.
    """
    speed = min(_pcie_speed(*end) for end in ends)
    return Way("PCIe", _HOST_SHARE * speed, _HOST_LATENCY_SECONDS) if speed else None


def from_host(generation: int | None, lanes: int | None) -> float | None:
    """Return the bytes per second of copies from pinned memory; None for an unknown connector."""
    return _PINNED_SHARE * _pcie_speed(generation, lanes) or None


# PCIe 4.0 with 16 lanes: 1.97 GB/s x 16 = 31.5 GB/s; copies through the host get 0.6 of it, 18.9.
def _pcie_speed(generation: int | None, lanes: int | None) -> float:
    return _LANE_BYTES_PER_SECOND.get(generation or 0, 0.0) * (lanes or 0)


def ways_between(
    ends: Iterable[tuple[str, End]], find_way: Callable[[End, End], Way | None]
) -> Iterator[tuple[str, str, Way]]:
    """Yield (name, name, connection) for each pair of devices whose connection is known.

    `ends` are pairs of a device's name and the data for `find_way`.
    """
    for (source, source_end), (target, target_end) in combinations(ends, 2):
        way = find_way(source_end, target_end)
        if way is not None:
            yield source, target, way


def links_of(ways: Iterable[tuple[str, str, Way]]) -> Iterator[Link]:
    """Yield the two links, one per direction, of each connection between two named devices."""
    for name, peer, way in ways:
        for source, target in ((name, peer), (peer, name)):
            yield Link(
                source=source,
                target=target,
                bytes_per_second=way.bytes_per_second,
                latency_seconds=way.latency_seconds,
            )

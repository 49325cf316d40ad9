"""Groups: exchangeable devices, and the links between groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from duoka.forecast.costs import Costs
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet

from .dynamic_programme import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup:
    """Devices equal in all but their names, by index, in the user's order."""

    index: int
    devices: tuple[int, ...]
    budget_bytes: int
    seconds: Floats | None


def link_seconds(costs: Costs, fleet: Fleet) -> Floats:
    """[devices, devices, num_blocks + 1]: seconds of the transfer at the cut before each block."""
    seconds = {
        (link.source, link.target): link.latency_seconds * costs.boundary_transfers
        + costs.boundary_bytes / link.bytes_per_second
        for link in fleet.links
    }
    slowest = np.max(list(seconds.values()), axis=0)
    return np.array(
        [
            [seconds.get((source, target), slowest) for target in fleet.names]
            for source in fleet.names
        ]
    )


def group_devices(
    costs: Costs,
    fleet: Fleet,
    *,
    links: Floats | None,
    timed: bool,
    fixed: frozenset[int] = frozenset(),
) -> tuple[DeviceGroup, ...]:
    """Group devices whose exchange changes no cost.

    The seconds of a stage are taken to depend on the device's speeds alone. Those in `fixed`
    can't be exchanged.
    """
    devices = fleet.devices

    def are_equal(index: int, other_index: int) -> bool:
        return (
            not fixed & {index, other_index}
            and devices[index].budget_bytes == devices[other_index].budget_bytes
            and (not timed or speeds(devices[index]) == speeds(devices[other_index]))
            and (links is None or _exchangeable(links, index, other_index))
        )

    return tuple(
        DeviceGroup(
            index=index,
            devices=tuple(group),
            budget_bytes=devices[group[0]].budget_bytes,
            seconds=costs.seconds(devices[group[0]]) if timed else None,
        )
        for index, group in enumerate(_group_indices(len(devices), are_equal))
    )


def exchangeable(fleet: Fleet) -> tuple[tuple[int, ...], ...]:
    """Return groups of devices equal in all but their names, by index, in the user's order."""
    devices = fleet.devices
    links = {(link.source, link.target): link for link in fleet.links}
    rates = np.zeros((2, len(devices), len(devices)))
    for (i, source), (j, target) in itertools.product(enumerate(fleet.names), repeat=2):
        if (link := links.get((source, target))) is not None:
            rates[:, i, j] = link.bytes_per_second, link.latency_seconds

    def are_equal(index: int, other_index: int) -> bool:
        return (
            devices[index].budget_bytes == devices[other_index].budget_bytes
            and speeds(devices[index]) == speeds(devices[other_index])
            and all(_exchangeable(rate, index, other_index) for rate in rates)
        )

    return tuple(map(tuple, _group_indices(len(devices), are_equal)))


def _group_indices(number: int, are_equal: Callable[[int, int], bool]) -> list[list[int]]:
    """Group indices, each like the first of its group."""
    groups: list[list[int]] = []
    for index in range(number):
        group = next((group for group in groups if are_equal(group[0], index)), None)
        if group is None:
            groups.append([index])
        else:
            group.append(index)
    return groups


def speeds(device: Device) -> tuple[float | None, ...]:
    """Return the speeds for the seconds of a stage, streamed weights included."""
    return (*device.speeds, device.host_bytes_per_second)


def _exchangeable(links: Floats, index: int, other_index: int) -> bool:
    """Return True if exchanging two devices keeps the speed of every link."""
    order = np.arange(len(links))
    order[[index, other_index]] = other_index, index
    return np.array_equal(links[np.ix_(order, order)], links)

"""Device groups: devices that can be exchanged without a change of costs, and transfer times."""

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
    """Exchangeable devices, by index in the fleet, in the user's order.

    `seconds` are those of each stage on a device of the group, [start, stop]; None if the search
    doesn't use times.
    """

    index: int
    devices: tuple[int, ...]
    budget_bytes: int
    seconds: Floats | None


def link_seconds(costs: Costs, fleet: Fleet) -> Floats:
    """Return the seconds of the transfer at the cut before each block, by sender and receiver.

    The result is [devices, devices, num_blocks + 1].
    """
    seconds = {
        (link.source, link.target): link.latency_seconds * costs.boundary_transfers
        + costs.boundary_bytes / link.bytes_per_second
        for link in fleet.links
    }
    # A pair of devices without a known link is assumed to be as slow as the slowest known link.
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

    Times count only if `timed`, and transfers only with `links`. The seconds of a stage are assumed
    to depend on the device's speeds alone. Devices in `fixed` (with pinned blocks) each form a
    group of their own.
    """
    devices = fleet.devices

    def properties(index: int) -> tuple[object, ...]:
        device = devices[index]
        identity = index if index in fixed else None
        return identity, device.budget_bytes, speeds(device) if timed else None

    return tuple(
        DeviceGroup(
            index=index,
            devices=tuple(group),
            budget_bytes=devices[group[0]].budget_bytes,
            seconds=costs.seconds(devices[group[0]]) if timed else None,
        )
        for index, group in enumerate(_group_indices(len(devices), properties, links))
    )


def exchangeable(fleet: Fleet) -> tuple[tuple[int, ...], ...]:
    """Return groups of devices with equal budgets, speeds and links, by index in the fleet."""
    devices = fleet.devices
    links = {(link.source, link.target): link for link in fleet.links}
    rates = np.zeros((2, len(devices), len(devices)))
    for (i, source), (j, target) in itertools.product(enumerate(fleet.names), repeat=2):
        if (link := links.get((source, target))) is not None:
            rates[:, i, j] = link.bytes_per_second, link.latency_seconds

    def properties(index: int) -> tuple[object, ...]:
        return devices[index].budget_bytes, speeds(devices[index])

    return tuple(map(tuple, _group_indices(len(devices), properties, np.moveaxis(rates, 0, -1))))


def _group_indices(
    number: int, properties: Callable[[int], object], links: Floats | None
) -> list[list[int]]:
    """Group indices with equal properties whose exchange changes no link, [index, index, ...]."""
    # Being exchangeable is an equivalence relation, so a device is compared with the first member
    # of each group alone. Example: A and B are joined by NVLink, C stands alone with the same
    # budget; exchanging A and B changes no link, exchanging B and C does: {A, B} and {C}.
    groups: list[list[int]] = []
    for index in range(number):
        for group in groups:
            is_equal = properties(group[0]) == properties(index)
            if is_equal and (links is None or _are_exchangeable(links, group[0], index)):
                group.append(index)
                break
        else:
            groups.append([index])
    return groups


def speeds(device: Device) -> tuple[float | None, ...]:
    """Return all speeds that the seconds of a stage depend on, for streamed weights too."""
    return (*device.speeds, device.host_bytes_per_second)


def _are_exchangeable(links: Floats, index: int, other_index: int) -> bool:
    """Return True if exchanging two devices keeps the speed of every link."""
    # Swap both rows and columns of the matrix of links, and compare with the matrix itself.
    order = np.arange(len(links))
    order[[index, other_index]] = other_index, index
    return np.array_equal(links[np.ix_(order, order)], links)

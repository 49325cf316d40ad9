"""Fleet: the devices that may be used, what each may hold, and the links between them.

A device's name is torch's: ``cuda:0``, ``cpu``, ``vgpu:1``. A budget is what the caching
allocator may *reserve* on it; the CUDA context and library overhead come on top and were
subtracted before a budget was made from free memory. Nothing here looks at hardware.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import FleetError, UsageError
from .units import format_bytes, parse_bytes

MAX_DEVICES = 64
_NAME = re.compile(r"[a-z]+(:(0|[1-9][0-9]{0,3}))?", re.ASCII)
_GROUP = re.compile(r"(?:(\d+)\s*[xX×*]\s*)?(.+)", re.ASCII)
_FORMS = (
    'write a budget for each GPU ("24GiB,12GiB" or "2x24GiB,12GiB"), or virtual GPUs '
    '("virtual:2x24GiB")'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device.

    Parameters
    ----------
    name : str
        torch's name of it.
    budget_bytes : int
        What the allocator may reserve there.
    product, uuid : str
        What NVML calls it, and its identity; empty when unknown.
    memory_bytes_per_second, flops_per_second : float, optional
        How fast it reads its memory and computes in 16 bit. None when unknown.

    Raises
    ------
    FleetError
        If the name isn't one of torch's form, or a number isn't positive.
    """

    name: str
    budget_bytes: int
    product: str = ""
    uuid: str = ""
    memory_bytes_per_second: float | None = None
    flops_per_second: float | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise FleetError(
                f"{self.name!r} is not the name of a device",
                hint="torch's names are cuda:0, cpu, vgpu:1",
            )
        if self.budget_bytes <= 0:
            raise FleetError(f"the budget of {self.name} is {self.budget_bytes} bytes")
        for field in ("memory_bytes_per_second", "flops_per_second"):
            speed = getattr(self, field)
            if speed is not None and not speed > 0:
                raise FleetError(f"{field} of {self.name} is {speed}; it must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How fast bytes go from one device to another; the way back is a link of its own.

    Parameters
    ----------
    source, target : str
        Names of two devices.
    bytes_per_second, latency_seconds : float

    Raises
    ------
    FleetError
        If the two are one, the speed isn't positive or the latency is negative.
    """

    source: str
    target: str
    bytes_per_second: float
    latency_seconds: float

    def __post_init__(self) -> None:
        if self.source == self.target:
            raise FleetError(f"a link from {self.source} to itself")
        if not self.bytes_per_second > 0 or not self.latency_seconds >= 0:
            raise FleetError(
                f"the link from {self.source} to {self.target} has {self.bytes_per_second} bytes "
                f"per second and {self.latency_seconds} seconds of latency"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The devices that may be used.

    Parameters
    ----------
    devices : tuple of Device
        In the user's order.
    links : tuple of Link
        Those that are known; a pair without one has an unknown speed.

    Raises
    ------
    FleetError
        If there is no device, more than `MAX_DEVICES`, a name stands twice, or a link is doubled
        or names another device.
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if not names:
            raise FleetError("no device to use", hint=_FORMS)
        if len(names) > MAX_DEVICES:
            raise FleetError(f"{len(names)} devices; at most {MAX_DEVICES} can be planned for")
        _refuse_doubled("the device", names)
        _refuse_doubled("the link", [f"{link.source} → {link.target}" for link in self.links])
        for link in self.links:
            for name in (link.source, link.target):
                if name not in names:
                    raise FleetError(f"a link names {name}, which is not in the fleet")

    @classmethod
    def parse(cls, text: str) -> Fleet:
        """Read a fleet as people write it.

        Parameters
        ----------
        text : str
            Budgets, separated by commas, in the order of torch's CUDA devices: "24GiB,12GiB" is
            24 GiB on ``cuda:0`` and 12 GiB on ``cuda:1``. "2x24GiB" stands for two equal ones.
            With "virtual:" before them they are virtual GPUs, ``vgpu:0`` and so on.

        Raises
        ------
        FleetError
            If the text names no device, or more than `MAX_DEVICES`.
        UsageError
            If it can't be understood.

        Examples
        --------
        >>> Fleet.parse("virtual:2x24GiB,12GiB").names
        ('vgpu:0', 'vgpu:1', 'vgpu:2')
        """
        head, colon, rest = text.strip().partition(":")
        if colon and head.strip().lower() != "virtual":
            raise UsageError(f"{text!r} is not a fleet: {head!r} is unknown", hint=_FORMS)
        kind, sizes = ("vgpu", rest) if colon else ("cuda", text)
        if not sizes.strip():
            raise FleetError(f"{text!r} names no device", hint=_FORMS)
        budgets: list[int] = []
        for group in sizes.split(","):
            budgets += _parse_group(group, text, room=MAX_DEVICES - len(budgets))
        return cls(
            devices=tuple(
                Device(name=f"{kind}:{index}", budget_bytes=budget)
                for index, budget in enumerate(budgets)
            )
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The devices' names, in order."""
        return tuple(device.name for device in self.devices)

    @property
    def budget_bytes(self) -> int:
        """All budgets together; no device can use another one's."""
        return sum(device.budget_bytes for device in self.devices)

    def device(self, name: str) -> Device:
        """Find a device by its name.

        Raises
        ------
        FleetError
            If there is none of that name.
        """
        for device in self.devices:
            if device.name == name:
                return device
        raise FleetError(f"{name!r} is not in the fleet", hint=f"it has {', '.join(self.names)}")

    def link(self, source: str, target: str) -> Link | None:
        """Find the link from one device to another; None when its speed is unknown."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        return None

    def describe(self) -> str:
        """Write the fleet on one line, for people.

        Examples
        --------
        >>> Fleet.parse("24GiB,12GiB").describe()
        'cuda:0 24.00 GiB, cuda:1 12.00 GiB'
        """
        return ", ".join(f"{d.name} {format_bytes(d.budget_bytes)}" for d in self.devices)


def _parse_group(group: str, text: str, *, room: int) -> list[int]:
    """Read "24GiB" or "2x24GiB"; `room` is how many devices may still come."""
    match = _GROUP.fullmatch(group.strip())
    if match is None:
        raise UsageError(f"{text!r} has an empty entry between its commas", hint=_FORMS)
    count_text, size = match.groups()
    # Digits are limited first: int() of a million digits takes long.
    count = int(count_text) if count_text and len(count_text) < 10 else None if count_text else 1
    if count == 0:
        raise FleetError(f"{group.strip()!r} in {text!r} is no device at all", hint=_FORMS)
    if count is None or count > room:
        raise FleetError(f"{text[:60]!r} is more than {MAX_DEVICES} devices")
    try:
        budget = parse_bytes(size)
    except UsageError as error:
        raise UsageError(f"{text!r} is not a fleet: {error}", hint=_FORMS) from error
    return [budget] * count


def _refuse_doubled(what: str, names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise FleetError(f"{what} {name} stands twice in the fleet")

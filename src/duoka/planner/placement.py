"""Placement: the device of every module, complete or refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from duoka.base.text import is_within, longest_prefix
from duoka.errors import Faults, FormatError, PlacementError
from duoka.forecast.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Module → device, in execution order.

    Parameters
    ----------
    entries : tuple of (str, str)
        Name of a module (or of a parameter) and torch's name of its device. A name stands for
        everything below it; "" stands for the whole model.
    fingerprint : str
        The checkpoint or model that the placement was made for; empty when unknown.

    Raises
    ------
    PlacementError
        If there is no entry, or a name stands twice.

    Examples
    --------
    >>> placement = Placement(entries=(("embed", "cuda:0"), ("head", "cuda:1")))
    >>> placement.device_of("head.weight")
    'cuda:1'
    >>> placement.devices
    ('cuda:0', 'cuda:1')
    """

    entries: tuple[tuple[str, str], ...]
    fingerprint: str = ""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.entries]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise PlacementError(
                f"{len(doubled)} names have two devices: {', '.join(doubled)}",
                faults=Faults(doubled=tuple(doubled)),
            )
        if not names:
            raise PlacementError("the placement is empty", hint='{"": "cuda:0"} is one device')

    @property
    def device_map(self) -> dict[str, str]:
        """The map for transformers' ``from_pretrained(device_map=…)``."""
        return dict(self.entries)

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices in order of first use."""
        return tuple(dict.fromkeys(device for _, device in self.entries))

    def device_of(self, name: str) -> str | None:
        """Return the device of a parameter, buffer or module; None without an entry."""
        device_map = self.device_map
        entry = longest_prefix(name, device_map)
        return None if entry is None else device_map[entry]

    def devices_of(self, profile: Profile) -> list[str]:
        """Return the device of every block.

        A block without a module is the caller's own work: it is where the block is that it is tied
        to, or with the block before it.
        """
        devices: list[str] = []
        for block in profile.blocks:
            device = None
            if block.modules:
                device = self.device_of(block.modules[0])
            elif devices:
                device = devices[-1 if block.tied_to is None else block.tied_to]
            if device is None:
                name = block.modules[0] if block.modules else "the model"
                raise FormatError(f"the plan has no placement of {name}")
            devices.append(device)
        return devices

    def check(self, names: Iterable[str]) -> None:
        """Refuse names without a device and entries of nothing, all at once."""
        names = tuple(names)
        device_map = self.device_map
        missing = [name for name in names if longest_prefix(name, device_map) is None]
        unknown = [
            entry for entry in device_map if not any(is_within(name, entry) for name in names)
        ]
        faults = [
            f"{len(wrong)} {text}: {', '.join(wrong)}"
            for wrong, text in (
                (missing, "parameters and buffers have no device"),
                (unknown, "entries don't exist in the model"),
            )
            if wrong
        ]
        if faults:
            raise PlacementError(
                "the placement is incomplete: " + "; ".join(faults),
                hint="use `duoka plan` to make the placement",
                faults=Faults(missing=tuple(missing), unknown=tuple(unknown)),
            )


def runs_of(device_of: Sequence[str], chain: Sequence[int]) -> list[tuple[str, int, int]]:
    """Return the runs of a chain of blocks on a device: device, start, stop in the chain."""
    runs: list[tuple[str, int, int]] = []
    for device, blocks in groupby(device_of[block] for block in chain):
        start = runs[-1][2] if runs else 0
        runs.append((device, start, start + len([*blocks])))
    return runs

"""Placement: the device of every module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from duoka.base.text import is_within, longest_prefix, value_of
from duoka.errors import Faults, FormatError, PlacementError
from duoka.forecast.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Module → device, in execution order.

    Parameters
    ----------
    entries : tuple of (str, str)
        Pairs of a module's (or parameter's) name and torch's name of its device. An entry applies
        to everything below its name; "" is the whole model.
    fingerprint : str
        Fingerprint of the checkpoint or model that the placement was made for; empty if unknown.

    Raises
    ------
    PlacementError
        If there is no entry, or a name occurs twice.

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
        """Return the device of a parameter, buffer or module; None if no entry applies."""
        return value_of(name, self.device_map)

    def devices_of(self, profile: Profile) -> list[str]:
        """Return the device of every block.

        A block without a module is work of the model's caller, outside of all modules. Its device
        is that of the block it is tied to, or else of the block before it.
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
        """Raise PlacementError with all names without a device and all entries without a name.

        `names` are those of the model's parameters and buffers.
        """
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
    """Return the runs of blocks on the same device, as (device, start, stop) in the chain."""
    runs: list[tuple[str, int, int]] = []
    for device, blocks in groupby(device_of[block] for block in chain):
        start = runs[-1][2] if runs else 0
        runs.append((device, start, start + len([*blocks])))
    return runs

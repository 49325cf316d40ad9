"""A map's entries one by one: which are real names, which devices, and what is meant."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .read import DeviceMap, Devices, NoDevice
from .spelling import Spelling
from .suggest import Finder, Nearest
from .wording import shown

# A hostile map may hold a million unknown names.
_MOST_LOOKED_FOR = 5_000


@dataclass(slots=True)
class Entries:
    """What the entries of a map say by themselves.

    Parameters
    ----------
    known : dict of str to str or None
        Real names with their devices; None for a device that isn't one.
    unknown : dict of str to Nearest
        Names of nothing, with the real ones that are like them.
    meant : dict of str to str
        Real names that unknown ones surely mean, with their devices.
    misplaced : dict of str to str
        Names whose device isn't one, with what was given and why not.
    doubled : tuple of str
        Names that stand twice.
    is_numbered : bool
        Whether devices are written as numbers.
    """

    known: dict[str, str | None] = field(default_factory=dict)
    unknown: dict[str, Nearest] = field(default_factory=dict)
    meant: dict[str, str] = field(default_factory=dict)
    misplaced: dict[str, str] = field(default_factory=dict)
    doubled: tuple[str, ...] = ()
    is_numbered: bool = False

    @classmethod
    def read(cls, device_map: DeviceMap, spelling: Spelling, devices: Devices) -> Entries:
        """Look at every entry."""
        count = Counter(name for name, _ in device_map.entries)
        read = cls(doubled=tuple(name for name in count if count[name] > 1))
        finder: Finder | None = None
        numbered = []
        for name, value in device_map.entries:
            device = None
            try:
                device = devices.find(value)
                numbered += [str(value).isdecimal()] if device != "cpu" else []
            except NoDevice as problem:
                read.misplaced[name] = f"{shown(str(value))} ({problem})"
            if spelling.is_known(name):
                read.known[name] = device
                continue
            finder = finder or Finder([*spelling.native, *spelling.published])
            read._look_up(name, device, finder)
        read.is_numbered = bool(numbered) and all(numbered)
        return read

    def _look_up(self, name: str, device: str | None, finder: Finder) -> None:
        if name not in self.unknown:
            is_looked_for = len(self.unknown) < _MOST_LOOKED_FOR
            self.unknown[name] = finder.find(name) if is_looked_for else Nearest()
        meant = self.unknown[name].meant
        if meant is not None and device is not None:
            self.meant.setdefault(meant, device)

    def are_published(self, spelling: Spelling) -> bool:
        """Whether the map is written in the checkpoint's names, mostly."""
        nearest = (near.names[0] for near in self.unknown.values() if near.names)
        names = [*self.known, *nearest]
        published = sum(name in spelling.published for name in names)
        return published > sum(name in spelling.renamed for name in names)

"""Names of modules and tensors, and of devices, that a person gives one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from duoka.base.text import is_within, longest_prefix, prefixes
from duoka.errors import UsageError
from duoka.forecast.tensor_names import NamedTensor, Outline
from duoka.hardware.fleet import Fleet

from .read import DeviceMap, Devices, NoDevice
from .suggest import Finder, Nearest, shown


def find_device(text: str, fleet: Fleet) -> str:
    """The name of the fleet's device that a person means: "cuda:1", or "1" alone."""
    devices = Devices(fleet)
    try:
        return devices.find(text)
    except NoDevice:
        hint = devices.describe()
        raise UsageError(f"{text[:60]!r} is no device of these GPUs", hint=hint) from None


class Spelling:
    """All names of an outline, and what each convention calls its modules.

    A name that both know means the model's own.
    """

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self.tensors = [tensor for block in outline.blocks for tensor in block.tensors]
        self.empty_modules = frozenset(outline.empty_modules)
        self.native = {""}
        for tensor in self.tensors:
            self.native.update(prefixes(tensor.name))

    @cached_property
    def renamed(self) -> set[str]:
        """The native names of what the checkpoint calls otherwise."""
        return {n for t in self.tensors if t.published for n in prefixes(t.name)} - {""}

    @cached_property
    def published(self) -> dict[str, set[str]]:
        """For each name that only the checkpoint knows, the native names of what it holds."""
        names: dict[str, set[str]] = {}
        for tensor in self.tensors:
            for source in tensor.published:
                for prefix in prefixes(source):
                    if prefix not in self.native:
                        names.setdefault(prefix, set()).add(tensor.name)
        return names

    def is_known(self, name: str) -> bool:
        """Whether a name is a module's or tensor's."""
        return name in self.native or name in self.published

    def blocks_of(self, name: str) -> list[int]:
        """The blocks that hold something of a module or tensor, in execution order."""
        if not name or not self.is_known(name):
            return []
        return [
            index
            for index, block in enumerate(self.outline.blocks)
            if any(self._is_of(tensor.name, name) for tensor in block.tensors)
        ]

    def _is_of(self, tensor: str, name: str) -> bool:
        return is_within(tensor, name) if name in self.native else tensor in self.published[name]

    def nearest(self, name: str) -> tuple[str, ...]:
        """Real names like one that isn't real."""
        return Finder([*self.native, *self.published]).find(name).names

    def module(self, name: str, tensors: tuple[NamedTensor, ...], *, published: bool) -> str:
        """What a module of a block is called; natively where the checkpoint has no name for it."""
        inside = {tensor.name: tensor for tensor in tensors if is_within(tensor.name, name)}
        if not published or not all(tensor.published for tensor in inside.values()):
            return name
        sources = [source for tensor in inside.values() for source in tensor.published]
        common = _common(sources) if sources else ""
        if common in sources and name not in inside:
            around = common.rpartition(".")[0]
            common = around if self.published.get(around) == set(inside) else common
        # It must hold the same tensors as the module and no others.
        return common if self.published.get(common) == set(inside) else name


def _common(names: list[str]) -> str:
    """The longest prefix of all names."""
    shared = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


def published_names(outline: Outline) -> dict[str, str]:
    """What the checkpoint calls the modules of an outline's blocks, where it has a name for one."""
    spelling = Spelling(outline)
    return {
        module: spelling.module(module, block.tensors, published=True)
        for block in outline.blocks
        for module in block.modules
    }


@dataclass(frozen=True, slots=True)
class Match:
    """What a map says of one tensor.

    `devices` are none, one, or several that contradict each other; `missing` names what of it has
    no entry, `clash` entries in its native and in published names that say different things.
    """

    devices: tuple[str, ...]
    missing: tuple[str, ...]
    clash: tuple[str, ...] = ()


class EntryMatcher:
    """A map's entries by convention; the device of an entry is None where it has none.

    An entry that one convention's longest name gives and one that the other's does may both speak
    of a tensor. If one of the two names contains the other, the longer decides, as everywhere.
    """

    def __init__(self, spelling: Spelling, entries: Mapping[str, str | None]) -> None:
        self._entries = entries
        self._native = {key for key in entries if key in spelling.native}
        self._published = {key for key in entries if key in spelling.published}

    def match(self, tensor: NamedTensor) -> Match:
        """Find what the map says of a tensor under one of its names."""
        native = longest_prefix(tensor.name, self._native)
        used: dict[str, None] = {}
        missing: list[str] = []
        clash: tuple[str, ...] = ()
        for source, other in self._by_source(tensor):
            keys = _stronger(native, other)
            said = {device for key in keys if (device := self._entries[key]) is not None}
            clash += keys if len(said) > 1 else ()
            if not keys:
                missing.append(source)
            used.update(dict.fromkeys(keys))
        devices = dict.fromkeys(self._entries[key] for key in used)
        return Match(tuple(d for d in devices if d is not None), tuple(missing), clash)

    def _by_source(self, tensor: NamedTensor) -> Iterator[tuple[str, str | None]]:
        """Each published tensor that makes this one, with the longest entry that contains it."""
        for source in tensor.published:
            yield source, longest_prefix(source, self._published)
        if not tensor.published:
            yield tensor.name, None


def _stronger(native: str | None, other: str | None) -> tuple[str, ...]:
    """Which of two entries decide: one where one name contains the other."""
    if native is None or other is None:
        return tuple(key for key in (native, other) if key is not None)
    # The other way round can't be: what contains a native name is one.
    return (other,) if is_within(other, native) else (native, other)


# A hostile map may hold a million unknown names.
_MOST_LOOKED_FOR = 5_000


@dataclass(slots=True)
class Entries:
    """What the entries of a map say by themselves.

    Real names with their devices are `known`, with None for a device that isn't one; names of
    nothing `unknown`; `meant` are real names that unknown ones surely mean. What was given as a
    device and isn't one is `misplaced`, with why not; names that stand twice are `doubled`. If
    any is misplaced, `likely` has the devices that such entries, or all, probably mean.
    """

    known: dict[str, str | None] = field(default_factory=dict)
    unknown: dict[str, Nearest] = field(default_factory=dict)
    meant: dict[str, str] = field(default_factory=dict)
    misplaced: dict[str, str] = field(default_factory=dict)
    likely: dict[str, str] = field(default_factory=dict)
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
                numbered += [True] if str(value).isdecimal() else []
            if name in spelling.empty_modules:  # nothing of it can be placed
                continue
            if spelling.is_known(name):
                read.known[name] = device
                continue
            finder = finder or Finder([*spelling.native, *spelling.published])
            read._look_up(name, device, finder)
        read.is_numbered = bool(numbered) and all(numbered)
        if read.misplaced:
            read.likely = devices.guess(dict(device_map.entries))
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

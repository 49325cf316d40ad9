"""Names of modules, tensors and devices in pins and device maps, in either naming convention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

from duoka.base.text import is_within, longest_prefix, prefixes
from duoka.errors import UsageError
from duoka.forecast.tensor_names import NamedTensor, Outline
from duoka.hardware.fleet import Fleet

from .read import DeviceMap, Devices, NoDevice
from .suggest import Finder, Nearest, printable_name


def find_device(text: str, fleet: Fleet) -> str:
    """Return the name of the fleet's device that a text means: "cuda:1", or "1" alone."""
    devices = Devices(fleet)
    try:
        return devices.resolve(text)
    except NoDevice:
        problem = f"{text[:60]!r} is not one of these GPUs"
        raise UsageError(problem, hint=devices.describe()) from None


class Spelling:
    """The names of a model's modules and tensors: native (the model's own) and published ones.

    Published names are those of the checkpoint. A name in both conventions is taken as native.
    """

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self.tensors = [tensor for block in outline.blocks for tensor in block.tensors]
        self.empty_modules = frozenset(outline.empty_modules)
        self.native = dict.fromkeys([""])  # ordered, so that ties among nearest names are too
        for tensor in self.tensors:
            self.native |= dict.fromkeys(prefixes(tensor.name))

    @cached_property
    def renamed(self) -> set[str]:
        """The native names of tensors with published names, and of the modules around them."""
        return {n for t in self.tensors if t.published for n in prefixes(t.name)} - {""}

    @cached_property
    def published(self) -> dict[str, set[str]]:
        """The native names of the tensors within each published name that isn't also native."""
        # Example: m.l.0.w published as p.0.q and p.0.k gives {"p": {m.l.0.w}, "p.0": {m.l.0.w},
        # "p.0.q": {m.l.0.w}, "p.0.k": {m.l.0.w}}. A name of both conventions is native, and absent.
        names: dict[str, set[str]] = {}
        for tensor in self.tensors:
            for source in tensor.published:
                for prefix in prefixes(source):
                    if prefix not in self.native:
                        names.setdefault(prefix, set()).add(tensor.name)
        return names

    def is_known(self, name: str) -> bool:
        """Return True if the name is that of a module or tensor, in either convention."""
        return name in self.native or name in self.published

    def blocks_of(self, name: str) -> list[int]:
        """Return the blocks with a tensor within a name, by index, in execution order."""
        within = self.published.get(name, set())
        if name and name in self.native:
            within = {tensor.name for tensor in self.tensors if is_within(tensor.name, name)}
        return [
            index
            for index, block in enumerate(self.outline.blocks)
            if any(tensor.name in within for tensor in block.tensors)
        ]

    @property
    def finder(self) -> Finder:
        """A finder of similar names, among all names of both conventions."""
        return Finder([*self.native, *self.published])

    def module(self, name: str, tensors: tuple[NamedTensor, ...], *, published: bool) -> str:
        """Return the name of a block's module, published if `published` and if there is one.

        `tensors` are those of the block, `name` is the native name.
        """
        tensors_inside = {tensor.name: tensor for tensor in tensors if is_within(tensor.name, name)}
        if not published or not all(tensor.published for tensor in tensors_inside.values()):
            return name
        # Example: m.layers.0 holds q and k, both from p.enc.0.qkv, and a norm from p.enc.0.n. The
        # longest common prefix p.enc.0 is its published name, provided that no tensor of another
        # module lies below it. For a single tensor the prefix is the tensor's own name, so its
        # parent is taken as the module.
        sources = [source for tensor in tensors_inside.values() for source in tensor.published]
        levels = zip(*(source.split(".") for source in sources), strict=False)
        shared = takewhile(lambda level: len(set(level)) == 1, levels)
        common = ".".join(level[0] for level in shared)
        if common in sources and name not in tensors_inside:
            parent = common.rpartition(".")[0]
            common = parent if self.published.get(parent) == set(tensors_inside) else common
        # The published name must contain the module's tensors and no others.
        return common if self.published.get(common) == set(tensors_inside) else name


def published_names(outline: Outline) -> dict[str, str]:
    """Map the modules of an outline's blocks to published names, or to themselves without one."""
    spelling = Spelling(outline)
    return {
        module: spelling.module(module, block.tensors, published=True)
        for block in outline.blocks
        for module in block.modules
    }


@dataclass(frozen=True, slots=True)
class Match:
    """The entries of a map for one tensor.

    `devices` are those of its entries: none, one, or several that contradict each other. `missing`
    are the tensor's names without an entry. `clash` are native and published entries that assign
    different devices.
    """

    devices: tuple[str, ...]
    missing: tuple[str, ...]
    clash: tuple[str, ...] = ()


class EntryMatcher:
    """Matches tensors with a map's entries; the device of an entry is None if it isn't valid.

    The longest native and the longest published entry may both match a tensor. If one of the two
    names contains the other, the longer name decides, as within a convention.
    """

    def __init__(self, spelling: Spelling, entries: Mapping[str, str | None]) -> None:
        self._entries = entries
        self._native = {key for key in entries if key in spelling.native}
        self._published = {key for key in entries if key in spelling.published}

    def match(self, tensor: NamedTensor) -> Match:
        """Match a tensor under all of its names."""
        # A tensor of duoka's class may be made of several published tensors (q, k and v in one),
        # each with an entry of its own, and may have a native entry, too. Example: entries "p.enc"
        # and "m.layers.0" for a tensor m.layers.0.w, published as p.enc.0.q and p.enc.0.k: neither
        # entry contains the other, so both apply to each of the two published tensors.
        native = longest_prefix(tensor.name, self._native)
        used: dict[str, None] = {}
        missing: list[str] = []
        clash: tuple[str, ...] = ()
        for source in tensor.published or (tensor.name,):
            published = longest_prefix(source, self._published) if tensor.published else None
            keys = _decisive_entries(native, published)
            devices = {device for key in keys if (device := self._entries[key]) is not None}
            clash += keys if len(devices) > 1 else ()
            if not keys:
                missing.append(source)
            used.update(dict.fromkeys(keys))
        matched_devices = dict.fromkeys(self._entries[key] for key in used)
        return Match(tuple(d for d in matched_devices if d is not None), tuple(missing), clash)


def _decisive_entries(native: str | None, published: str | None) -> tuple[str, ...]:
    """Return the entries that apply: the longer name if it is within the shorter, else both."""
    if native is None or published is None:
        return tuple(key for key in (native, published) if key is not None)
    # A native name is never within a published one, because a name that contains it is native.
    return (published,) if is_within(published, native) else (native, published)


@dataclass(slots=True)
class Entries:
    """The entries of a map, checked one by one.

    - `known`: real names with their devices, None for an invalid device
    - `unknown`: names without a module or tensor, with similar real names
    - `meant`: real names that unknown names certainly mean, with their devices
    - `misplaced`: names with an invalid device, with the reason
    - `likely`: if there are misplaced names, devices guessed for them or for all names
    - `doubled`: names that occur twice
    - `is_numbered`: True if all GPUs are written as bare numbers
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
        """Check every entry of a map."""
        # Example, for a fleet of cuda:0 and cuda:1 and a model with layers.0, layers.1 and norm:
        #
        #   entry           becomes
        #   layers.0: 0     known[layers.0] = cuda:0
        #   layer.1: 0      unknown[layer.1], with layers.1 as nearest; meant[layers.1] = cuda:0
        #   norm: 7         known[norm] = None, misplaced[norm]; likely[norm] = cuda:1 (unused)
        #
        # If all GPUs are bare numbers (`is_numbered`), a completed map has numbers, too.
        counts = Counter(name for name, _ in device_map.entries)
        entries = cls(doubled=tuple(name for name in counts if counts[name] > 1))
        finder: Finder | None = None
        numbered = []
        for name, value in device_map.entries:
            device = None
            try:
                device = devices.resolve(value)
            except NoDevice as problem:
                entries.misplaced[name] = f"{printable_name(str(value))} ({problem})"
            if device != "cpu" and (device is not None or str(value).isdecimal()):
                numbered.append(str(value).isdecimal())
            if name in spelling.empty_modules:  # has no tensor to place
                continue
            if spelling.is_known(name):
                entries.known[name] = device
                continue
            if name not in entries.unknown:
                finder = finder or spelling.finder
                entries.unknown[name] = finder.search(name)
            real_name = entries.unknown[name].meant
            if real_name is not None and device is not None:
                entries.meant.setdefault(real_name, device)
        entries.is_numbered = bool(numbered) and all(numbered)
        if entries.misplaced:
            entries.likely = devices.guess(dict(device_map.entries))
        return entries

    def are_published(self, spelling: Spelling) -> bool:
        """Return True if most names of the map are published ones."""
        # Names that are equal in both conventions don't count; an unknown name counts as the most
        # similar real name. If the numbers are equal, the map counts as native.
        nearest = (near.names[0] for near in self.unknown.values() if near.names)
        names = [*self.known, *nearest]
        published = sum(name in spelling.published for name in names)
        return published > sum(name in spelling.renamed for name in names)

"""Validate a device map: one device for every block, or an error with all faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from duoka.base.text import is_within
from duoka.errors import Faults, PlacementError
from duoka.forecast.tensor_names import NamedTensor, Outline, OutlineBlock
from duoka.hardware.fleet import Fleet

from .names import Entries, EntryMatcher, Match, Spelling
from .read import DeviceMap, Devices
from .suggest import corrections, listed, printable_name, runs, shorten

_HINT = (
    "`duoka plan --device-map … --save-device-map FILE` writes the completed map; in Python it is "
    "the error's `completed`"
)

Placed = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Modules with devices, in execution order, and notes on buffers that follow their block."""

    placed: Placed
    notes: tuple[str, ...] = ()


def judge(device_map: object, outline: Outline, fleet: Fleet | None = None) -> Judgement:
    """Assign a device to every module by a user's device map; PlacementError has all its faults.

    Buffers follow the parameters of their block.
    """
    return _Judge(DeviceMap.of(device_map), outline, Devices(fleet)).judge()


@dataclass(slots=True, eq=False)
class _Part:
    """Blocks that must share a device: a single block, or tied blocks; with their matches."""

    blocks: list[OutlineBlock]
    matches: dict[str, Match]

    @property
    def tensors(self) -> list[NamedTensor]:
        return [tensor for block in self.blocks for tensor in block.tensors]

    def devices(self) -> list[str]:
        """Return the devices that the map assigns to these blocks, clashing entries left out.

        If entries match parameters, only those count, because buffers follow the parameters.
        """
        devices: dict[bool, dict[str, None]] = {False: {}, True: {}}
        for tensor in self.tensors:
            match = self.matches[tensor.name]
            if not match.clash:
                devices[tensor.is_buffer] |= dict.fromkeys(match.devices)
        return [*(devices[False] or devices[True])]

    def notes(self) -> Iterator[str]:
        """Yield a sentence for each device from which buffers move to the parameters' device."""
        (target,) = self.devices()
        owners = [t.name.rpartition(".")[0] for t in self.tensors if not t.is_buffer]
        displaced: dict[str, dict[str, None]] = {}
        for tensor in self.tensors:
            owner = tensor.name.rpartition(".")[0]
            for device in self.matches[tensor.name].devices:
                if device != target:
                    name = tensor.name if owner in owners else owner
                    displaced.setdefault(device, {})[name] = None
        for device, names in displaced.items():
            goes, it, verb = ("goes", "it", "holds") if len(names) == 1 else ("go", "they", "hold")
            yield (
                f"{shorten(names)} {goes} to {target} with {printable_name(owners[0])}, and not "
                f"to {device}: {it} {verb} no parameters"
            )

    def heaviest(self) -> str | None:
        """Return the device that the map assigns most bytes of these blocks; None if none."""
        weights: Counter[str] = Counter()
        for tensor in self.tensors:
            for device in self.matches[tensor.name].devices:
                weights[device] += tensor.num_bytes
        # If bytes are equal, max returns the first device.
        return max(weights, key=weights.__getitem__, default=None)


class _Judge:
    """The validation of one map: finds all faults, or places all modules."""

    def __init__(self, device_map: DeviceMap, outline: Outline, devices: Devices) -> None:
        self.outline = outline
        self.devices = devices
        self.spelling = Spelling(outline)
        self.entries = Entries.read(device_map, self.spelling, devices)
        self.published = self.entries.are_published(self.spelling)
        self.parts = self._match_parts(self.entries.known)

    def judge(self) -> Judgement:
        faults = self._find_faults()
        if not faults:
            notes = tuple(note for part in self.parts for note in part.notes())
            return Judgement(placed=tuple(self._place_modules()), notes=notes)
        faults = replace(faults, completed=self._complete_map())
        raise PlacementError(self._describe_faults(faults), hint=_HINT, faults=faults)

    # ── judging ──

    def _match_parts(self, entries: Mapping[str, str | None]) -> list[_Part]:
        """Match the entries with all blocks, grouped into parts of tied blocks."""
        # Tied blocks share weights, so they form one part, found by following `tied_to` to the
        # root: embedding 0, layers 1 and 2, head 3 tied to 0 give the parts {0, 3}, {1}, {2}.
        matcher = EntryMatcher(self.spelling, entries)
        tied: dict[int, list[OutlineBlock]] = {}
        blocks = self.outline.blocks
        for index, block in enumerate(blocks):
            root = index
            while (partner := blocks[root].tied_to) is not None:
                root = partner
            if block.modules:
                tied.setdefault(root, []).append(block)
        parts = [_Part(group, {}) for group in tied.values()]
        for part in parts:
            matches = {tensor.name: matcher.match(tensor) for tensor in part.tensors}
            # A tensor without an entry takes the device of the tensor that it is tied to.
            complete = {t.tied_to or t.name for t in part.tensors if not matches[t.name].missing}
            for tensor in part.tensors:
                if (tensor.tied_to or tensor.name) in complete:
                    matches[tensor.name] = replace(matches[tensor.name], missing=())
            part.matches = matches
        return parts

    def _find_faults(self) -> Faults:
        """Collect all faults of the map; falsy if there is none."""
        clashes = (key for part in self.parts for m in part.matches.values() for key in m.clash)
        missing = [name for part in self.parts for name in self._missing(part, part.tensors)]
        return Faults(
            missing=tuple(dict.fromkeys(missing)),
            unknown=tuple(self.entries.unknown),
            doubled=tuple(dict.fromkeys([*self.entries.doubled, *clashes])),
            split=tuple(name for part in self.parts for name in self._split(part)),
            misplaced=tuple(self.entries.misplaced),
            nearest={name: near.names for name, near in self.entries.unknown.items() if near.names},
        )

    def _missing(self, part: _Part, tensors: Iterable[NamedTensor]) -> Iterator[str]:
        """Yield the names of the tensors that need an entry and have none."""
        for tensor in tensors:
            missing = part.matches[tensor.name].missing
            # A buffer that isn't saved in checkpoints follows its block.
            if missing and not tensor.tied_to and (tensor.is_saved or not part.devices()):
                yield from missing if self.published else (tensor.name,)

    def _split(self, part: _Part) -> list[str]:
        return list(self._modules(part.blocks)) if len(part.devices()) > 1 else []

    def _modules(self, blocks: Iterable[OutlineBlock]) -> Iterator[str]:
        """Yield the names of the blocks' modules, in the convention of the map."""
        for block in blocks:
            for module in block.modules:
                yield self.spelling.module(module, block.tensors, published=self.published)

    def _place_modules(self) -> Iterator[tuple[str, str]]:
        device_of = {id(block): part.devices()[0] for part in self.parts for block in part.blocks}
        for block in self.outline.blocks:
            for module in block.modules:
                yield module, device_of[id(block)]

    def _complete_map(self) -> dict[str, int | str]:
        """Return the completed map: valid entries, corrected names, and neighbours' devices."""
        # Valid entries override corrected names, and guessed devices override both. A part takes
        # the device with most of its bytes. A part without a device follows the part before it;
        # parts before the first one with a device follow that one.
        #
        # Example: blocks embed, layers.0, layers.1, head, and a map {"layer.0": 0, "layers.1": 1}:
        # "layer.0" is corrected to layers.0 on 0; embed follows layers.0, head follows layers.1:
        # {"embed": 0, "layers.0": 0, "layers.1": 1, "head": 1}.
        usable = {name: device for name, device in self.entries.known.items() if device}
        parts = self._match_parts({**self.entries.meant, **usable, **self.entries.likely})
        device_of = {part: part.heaviest() for part in parts}
        part_of = {id(block): part for part in parts for block in part.blocks}
        blocks = [block for block in self.outline.blocks if block.modules]
        order = [part_of[id(block)] for block in blocks]
        neighbour = next(filter(None, map(device_of.__getitem__, order)), self.devices.default)
        completed: dict[str, int | str] = {}
        for block, part in zip(blocks, order, strict=True):
            neighbour = device_of[part] = device_of[part] or neighbour
            completed |= dict.fromkeys(self._modules([block]), self._format_device(neighbour))
        return completed

    def _format_device(self, device: str) -> int | str:
        """Format a device as in the map: as a number if all its GPUs are numbers."""
        number = device.partition(":")[2]
        return int(number) if self.entries.is_numbered and number else device

    # ── messages ──

    def _describe_faults(self, faults: Faults) -> str:
        """Return the error message, with one line for each kind of fault."""
        lines = [
            ("no device for", listed(runs(self._missing_modules()))),
            ("unknown names", listed(corrections(faults))),
            ("two devices for", listed(runs(faults.doubled))),
            ("split, but must stay whole", listed(list(self._describe_splits()))),
            ("devices that can't be used", listed(self._describe_misplaced(), "; ")),
        ]
        faulty = "\n".join(f"  {fault}: {names}" for fault, names in lines if names)
        return f"the device map is not valid for {self.outline.model}:\n{faulty}"

    def _missing_modules(self) -> Iterator[str]:
        """Yield the missing names; a module without any entry as a single name."""
        for part in self.parts:
            for block in part.blocks:
                for module, name in zip(block.modules, self._modules([block]), strict=True):
                    tensors = [t for t in block.tensors if is_within(t.name, module)]
                    if all(part.matches[tensor.name].missing for tensor in tensors):
                        yield name
                    else:
                        yield from self._missing(part, tensors)

    def _describe_splits(self) -> Iterator[str]:
        """Describe the modules that the map splits, grouped by their devices."""
        cut: dict[tuple[bool, tuple[str, ...]], list[str]] = {}
        for part in self.parts:
            names = self._split(part)
            if names:
                cut.setdefault((len(part.blocks) > 1, tuple(part.devices())), []).extend(names)
        for (is_tied, devices), names in cut.items():
            why = ", which share weights" if is_tied else ""
            yield f"{listed(runs(names))}{why} (on {' and '.join(devices)})"

    def _describe_misplaced(self) -> list[str]:
        by_problem: dict[str, list[str]] = {}
        for name, problem in self.entries.misplaced.items():
            by_problem.setdefault(problem, []).append(name)
        lines = [f"{problem} for {listed(runs(names))}" for problem, names in by_problem.items()]
        return [*lines, *filter(None, [self.devices.describe()] if lines else [])]

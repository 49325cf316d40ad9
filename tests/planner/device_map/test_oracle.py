"""Random maps, judged and held against trying every entry on every tensor."""

from __future__ import annotations

from dataclasses import dataclass, field

from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from duoka import Fleet
from duoka.errors import PlacementError
from duoka.forecast.tensor_names import NamedTensor
from duoka.planner.device_map import DeviceMap, judge
from duoka.planner.device_map.read import Devices, NoDevice

from .outlines import SMALL

FLEET = Fleet.parse("virtual:3x1GiB")
TENSORS = [tensor for block in SMALL.blocks for tensor in block.tensors]
NATIVE = {tensor.name for tensor in TENSORS}
PUBLISHED = {name for tensor in TENSORS for name in tensor.published}
# The blocks that are one: the head's weight is the embedding's.
TOGETHER = [{0, 5}, {1}, {2}, {3}, {4}]


def holds(key: str, name: str) -> bool:
    return not key or name == key or name.startswith(key + ".")


def prefixes(names: set[str]) -> list[str]:
    parts = (name.split(".") for name in names)
    return sorted({".".join(each[:end]) for each in parts for end in range(len(each) + 1)})


REAL = sorted({*prefixes(NATIVE), *prefixes(PUBLISHED)})


@dataclass
class Oracle:
    """What is wrong with a map, found by trying everything."""

    entries: tuple[tuple[str, object], ...]
    missing: set[str] = field(default_factory=set)
    missing_published: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    doubled: set[str] = field(default_factory=set)
    misplaced: set[str] = field(default_factory=set)
    split: list[set[int]] = field(default_factory=list)
    devices: dict[str, set[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [name for name, _ in self.entries]
        self.doubled = {name for name in names if names.count(name) > 1}
        self.device: dict[str, str | None] = {}
        for name, value in self.entries:
            if not any(holds(name, known) for known in NATIVE | PUBLISHED):
                self.unknown.add(name)
            try:
                self.device[name] = Devices(FLEET).resolve(value)
            except NoDevice:
                self.device[name] = None
                self.misplaced.add(name)
        clear: dict[str, set[str]] = {}
        lacking: dict[str, set[str]] = {}
        for tensor in TENSORS:
            self._look(tensor, clear, lacking)
        for canonical in {tensor.tied_to or tensor.name for tensor in TENSORS}:
            self._join(canonical, lacking)
        for group in TOGETHER:
            found = [clear[t.name] for number in group for t in SMALL.blocks[number].tensors]
            if len(set().union(*found)) > 1:
                self.split.append(group)

    def _look(
        self, tensor: NamedTensor, clear: dict[str, set[str]], lacking: dict[str, set[str]]
    ) -> None:
        used: set[str] = set()
        clash = False
        lacking[tensor.name] = set()
        for part in tensor.published or (tensor.name,):
            native = [k for k in self.device if holds(k, tensor.name)]
            others = [
                k
                for k in self.device
                if holds(k, part) and not any(holds(k, name) for name in NATIVE)
            ]
            best = {max(keys, key=len) for keys in (native, others) if keys}
            best = {k for k in best if not any(k != o and holds(k, o) for o in best)}
            if not best:
                lacking[tensor.name].add(part)
            if len({self.device[k] for k in best} - {None}) > 1:
                clash = True
                self.doubled |= best
            used |= best
        devices = {device for k in used if (device := self.device[k]) is not None}
        self.devices[tensor.name] = devices
        clear[tensor.name] = set() if clash else devices

    def _join(self, canonical: str, lacking: dict[str, set[str]]) -> None:
        names = [t.name for t in TENSORS if canonical in (t.name, t.tied_to)]
        if all(lacking[name] for name in names):
            self.missing.add(canonical)
            self.missing_published |= lacking[canonical]

    @property
    def is_good(self) -> bool:
        return not any((self.missing, self.unknown, self.doubled, self.misplaced, self.split))


DEVICES: list[object] = [
    *(0, 1, 2, 0, 1, 2, "0", "vgpu:1", "vgpu", 3, -1, "cuda:0", "cpu", "disk", "meta", "auto"),
    *(None, True, 1.5, [], {}),
]


@st.composite
def names(draw: st.DrawFn) -> str:
    name = draw(st.sampled_from(REAL))
    kind = draw(st.integers(0, 11))
    if kind == 0:
        return draw(st.text(max_size=8))
    if kind == 1:
        return draw(st.sampled_from([f"{name}.", f" {name}", f"{name}s", name[1:], name.upper()]))
    if kind == 2:
        return name.replace("0", "7")
    return name


ENTRIES = st.lists(st.tuples(names(), st.sampled_from(DEVICES)), max_size=8)
GOOD = st.lists(st.tuples(st.sampled_from(REAL), st.integers(0, 2)), max_size=10)
# Over a map of everything, so that many are nearly right.
COMPLETE = st.tuples(
    st.tuples(st.just(""), st.integers(0, 2)),
    *(st.tuples(st.just(f"m.layers.{n}"), st.integers(0, 2)) for n in (0, 1)),
).map(list)


@fuzz(300)
@given(st.one_of(ENTRIES, GOOD, st.tuples(COMPLETE, GOOD | ENTRIES).map(lambda p: p[0] + p[1])))
def test_a_map_is_judged_as_by_trying_everything(entries: list[tuple[str, object]]) -> None:
    oracle = Oracle(tuple(entries))
    try:
        placed = dict(judge(DeviceMap(oracle.entries), SMALL, FLEET).placed)
    except PlacementError as error:
        check(error, oracle)
        return
    assert oracle.is_good
    modules = [name for block in SMALL.blocks for name in block.modules]
    assert list(placed) == modules
    for tensor in TENSORS:
        (module,) = (name for name in modules if holds(name, tensor.name))
        told = oracle.devices[tensor.name] or oracle.devices[tensor.tied_to]
        assert told == {placed[module]}


def check(error: PlacementError, oracle: Oracle) -> None:
    assert not oracle.is_good
    assert set(error.missing) in (oracle.missing, oracle.missing_published)
    assert set(error.unknown) == oracle.unknown
    assert set(error.doubled) == oracle.doubled
    assert set(error.misplaced) == oracle.misplaced
    cut = [
        {name for number in group for name in SMALL.blocks[number].modules}
        for group in oracle.split
    ]
    assert len(error.split) == sum(map(len, cut))
    for near in error.nearest.values():
        assert set(near) <= set(REAL)
    for kind in (error.missing, error.unknown, error.doubled, error.split, error.misplaced):
        assert len(set(kind)) == len(kind)
    assert error.completed is not None
    completed = dict(judge(error.completed, SMALL, FLEET).placed)
    for group in TOGETHER:
        inside = [tensor for number in group for tensor in SMALL.blocks[number].tensors]
        told = set().union(*(oracle.devices[tensor.name] for tensor in inside))
        if len(told) == 1:
            kept = {completed[name] for number in group for name in SMALL.blocks[number].modules}
            # Where an entry can't be used, one with a wider or a similar name says what to do.
            assert kept == told or error.unknown or error.misplaced
    str(error).encode("utf-8")

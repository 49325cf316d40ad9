"""The real names that an unknown one probably means.

Names are compared with a "*" for each number in them; so a map of another version of a model, with
hundreds of entries, asks only a few problems.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

from duoka.errors import Faults

_LONGEST_COMPARED = 200
# Comparing letters takes long; a hostile map must not make it last. Beyond so many comparisons
# only names with a part more or less are found.
_MOST_COMPARISONS = 20_000
_LIKE, _ALMOST = 0.6, 0.85
_MOST_SHOWN = 3

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nearest:
    """Real names, best first; `meant` is the one that is surely meant, if any is."""

    names: tuple[str, ...] = ()
    meant: str | None = None


class Finder:
    """Looks for real names of modules and tensors."""

    def __init__(self, names: Iterable[str]) -> None:
        self._numbered: dict[str, dict[Numbers, str]] = {}
        for name in names:
            pattern, numbers = _pattern(name)
            self._numbered.setdefault(pattern, {}).setdefault(numbers, name)
        self._similar: dict[str, list[tuple[float, str]]] = {}
        self._ordered: dict[str, list[Numbers]] = {}
        self._comparisons = 0

    def find(self, name: str) -> Nearest:
        """Find what a name that isn't real means."""
        if len(name) > _LONGEST_COMPARED:
            return Nearest()
        pattern, numbers = _pattern(name.strip().strip("."))
        if pattern not in self._similar:
            self._similar[pattern] = self._like(pattern)
        near: dict[str, float] = {}
        meant = None
        for score, other in self._similar[pattern]:
            known = self._numbered[other]
            if meant is None and not near and score >= _ALMOST:
                meant = known.get(numbers)
            real = known.get(numbers) or self._closest(other, numbers)
            near[real] = score
        return Nearest(tuple(near), meant)

    def _like(self, pattern: str) -> list[tuple[float, str]]:
        scored = ((self._score(pattern, other), other) for other in self._numbered if other)
        best = sorted((pair for pair in scored if pair[0] >= _LIKE), key=lambda pair: -pair[0])
        surest = best[0][0] if best else 0.0
        # Beside one that is equal or almost equal, what is merely alike only confuses.
        least = surest if surest == 1.0 else min(surest, _ALMOST)
        return [pair for pair in best if pair[0] >= least][:_MOST_SHOWN]

    def _closest(self, pattern: str, numbers: Numbers) -> str:
        """The name of this kind that is next in order: the last layer for one beyond it."""
        ordered = self._ordered.setdefault(pattern, sorted(self._numbered[pattern]))
        place = min(bisect_left(ordered, numbers), len(ordered) - 1)
        return self._numbered[pattern][ordered[place]]

    def _score(self, pattern: str, other: str) -> float:
        one, two = pattern.lower().split("."), other.lower().split(".")
        if one == two:
            return 1.0
        short, long = sorted((one, two), key=len)
        if short[-1] == long[-1] and _is_within(short, long):
            return _ALMOST + (1 - _ALMOST) * len(short) / len(long)
        self._comparisons += 1
        if self._comparisons > _MOST_COMPARISONS:
            return 0.0
        matcher = SequenceMatcher(None, pattern, other, autojunk=False)
        if matcher.real_quick_ratio() < _LIKE or matcher.quick_ratio() < _LIKE:
            return 0.0
        # Another number of numbers is another kind of module.
        return matcher.ratio() * (1.0 if one.count("*") == two.count("*") else 0.8)


def _pattern(name: str) -> tuple[str, Numbers]:
    """The name with "*" for its numbers, and these."""
    parts = name.split(".")
    numbers = tuple(int(part) for part in parts if _is_number(part))
    return ".".join("*" if _is_number(part) else part for part in parts), numbers


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal()


def _is_within(short: list[str], long: list[str]) -> bool:
    """Whether the parts of one stand in the other in the same order."""
    rest = iter(long)
    return all(part in rest for part in short)


_LONGEST_NAME = 120
_MOST_RUNS = 60


def shorten(names: Iterable[str]) -> str:
    """Write names with those that differ in one number as a run."""
    return listed(runs(names))


def runs(names: Iterable[str]) -> list[str]:
    """The same as a list."""
    numbers_of: dict[tuple[str, str | None], list[int]] = {}
    for name in names:
        head, number, tail = _parted(name)
        if number is None:
            numbers_of[name, None] = []
        else:
            numbers_of.setdefault((head, tail), []).append(number)
    return [
        shown(head) if tail is None else shown(f"{head}{_ranges(numbers)}{tail}")
        for (head, tail), numbers in numbers_of.items()
    ]


def arrows(pairs: Mapping[str, str]) -> Iterator[str]:
    """Write what each name becomes, runs beside runs; a name that becomes nothing stands alone."""
    groups: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
    for old, new in pairs.items():
        before, after = _parted(old), _parted(new)
        key = (before[0], before[2], after[0], after[2]) if before[1] == after[1] else (old, new)
        group = groups.setdefault(key, ([], []))
        group[0].append(old)
        group[1].append(new)
    for olds, news in groups.values():
        left = shorten(olds)
        yield f"{left} → {shorten(news)}" if any(news) else left


def meant(faults: Faults) -> list[str]:
    """Write the names of nothing, each with the nearest real one if there is one."""
    nearest = {name: [*faults.nearest.get(name, ()), ""][0] for name in faults.unknown}
    return list(arrows(nearest))


def listed(texts: list[str], between: str = ", ") -> str:
    """Join texts; of very many only the first, and how many more there are."""
    more = [f"and {len(texts) - _MOST_RUNS} more"] if len(texts) > _MOST_RUNS else []
    return between.join([*texts[:_MOST_RUNS], *more])


def shown(name: str) -> str:
    """A name that is safe to print: what was given may hold anything."""
    safe = name if name.isprintable() and name == name.strip() and name else ascii(name)
    return safe if len(safe) <= _LONGEST_NAME else safe[: _LONGEST_NAME - 1] + "…"


def _parted(name: str) -> tuple[str, int | None, str]:
    """What stands before the first number in a name, that number, and what stands behind it."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        # Written in another way than numbers are ("007"), it is no part of a run.
        if part.isascii() and part.isdecimal() and len(part) < 10 and str(int(part)) == part:
            head, tail = ".".join(parts[:place]), ".".join(parts[place + 1 :])
            return f"{head}." if place else "", int(part), f".{tail}" if tail else ""
    return name, None, ""


def _ranges(numbers: list[int]) -> str:
    ordered = sorted(set(numbers))
    breaks = [i for i, (a, b) in enumerate(pairwise(ordered), start=1) if b != a + 1]
    groups = [ordered[i:j] for i, j in pairwise([0, *breaks, len(ordered)])]
    return ",".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups)

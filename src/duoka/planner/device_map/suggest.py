"""Real names similar to unknown names, and short texts for many names.

Names are compared as patterns with "*" for each number, so a map for another version of a model,
with hundreds of entries, takes only a few comparisons.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import pairwise

from duoka.errors import Faults

_LIKE, _ALMOST = 0.6, 0.85
_MOST_SHOWN = 3
_LONGEST_NAME = 120
_MOST_RUNS = 60

Numbers = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Nearest:
    """Real names, the most similar first; `meant` is the certainly meant name, None if unsure."""

    names: tuple[str, ...] = ()
    meant: str | None = None


class Finder:
    """A search for the real names of modules and tensors most similar to a text."""

    def __init__(self, names: Iterable[str]) -> None:
        # "layers.3.mlp" is the pattern "layers.*.mlp" with the numbers (3,). A model of a hundred
        # layers has a few dozen patterns. An unknown name is compared with these, and then matched
        # with the real name of the same numbers, or of the next ones: layers.99 → layers.27.
        numbered: dict[str, dict[Numbers, str]] = {}
        for name in names:
            pattern, numbers = _pattern(name)
            numbered.setdefault(pattern, {}).setdefault(numbers, name)
        self._numbered = {
            pattern: dict(sorted(by_numbers.items())) for pattern, by_numbers in numbered.items()
        }
        self._similar: dict[str, list[tuple[float, str]]] = {}

    def search(self, name: str) -> Nearest:
        """Find the real names most similar to a name."""
        pattern, numbers = _pattern(name.strip().strip("."))
        if pattern not in self._similar:
            self._similar[pattern] = self._find_patterns(pattern)
        similar = self._similar[pattern]
        names = dict.fromkeys(self._find_closest(real, numbers) for _, real in similar)
        is_sure = bool(similar) and similar[0][0] >= _ALMOST
        return Nearest(
            tuple(names), self._numbered[similar[0][1]].get(numbers) if is_sure else None
        )

    def _find_patterns(self, pattern: str) -> list[tuple[float, str]]:
        scored = ((_score(pattern, real), real) for real in self._numbered if real)
        best = sorted((pair for pair in scored if pair[0] >= _LIKE), key=lambda pair: -pair[0])
        surest = best[0][0] if best else 0.0
        # With an equal or almost equal pattern, less similar patterns are left out.
        threshold = surest if surest == 1.0 else min(surest, _ALMOST)
        return [pair for pair in best if pair[0] >= threshold][:_MOST_SHOWN]

    def _find_closest(self, pattern: str, numbers: Numbers) -> str:
        """Return the pattern's name with these numbers or the next larger ones, else the last."""
        ordered = [*self._numbered[pattern]]
        place = min(bisect_left(ordered, numbers), len(ordered) - 1)
        return self._numbered[pattern][ordered[place]]


def _score(pattern: str, real: str) -> float:
    """Return the similarity of two patterns: 1 if equal, at least `_ALMOST` if certainly meant."""
    #   layers.*.mlp  and  model.layers.*.mlp     a part left out: 0.85 + 0.15 x 3/4 = 0.96
    #   layer.*.mlp   and  layers.*.mlp           equal letters, 2 x 11 of 11 + 12: 0.96
    #
    # `part in rest` on an iterator consumes it up to the match: a test for a subsequence.
    parts, real_parts = pattern.lower().split("."), real.lower().split(".")
    if parts == real_parts:
        return 1.0
    short, long = sorted((parts, real_parts), key=len)
    rest = iter(long)
    if short[-1] == long[-1] and all(part in rest for part in short):
        return _ALMOST + (1 - _ALMOST) * len(short) / len(long)
    # Patterns with different counts of numbers are different kinds of modules.
    factor = 1.0 if parts.count("*") == real_parts.count("*") else 0.8
    return SequenceMatcher(None, pattern, real, autojunk=False).ratio() * factor


def _pattern(name: str) -> tuple[str, Numbers]:
    """Split a name into its pattern, with "*" for numbers, and the numbers."""
    parts = name.split(".")
    numbers = tuple(int(part) for part in parts if _is_number(part))
    return ".".join("*" if _is_number(part) else part for part in parts), numbers


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal()


def shorten(names: Iterable[str]) -> str:
    """Join names with commas, numbered names as a range: "layers.0-27"."""
    return listed(runs(names))


def runs(names: Iterable[str]) -> list[str]:
    """List names, with names that differ in their first number joined to a range."""
    numbers_of: dict[tuple[str, str | None], list[int]] = {}
    for name in names:
        head, number, tail = _split_at_first_number(name)
        if number is None:
            numbers_of[name, None] = []
        else:
            numbers_of.setdefault((head, tail), []).append(number)
    return [
        printable_name(head) if tail is None else printable_name(f"{head}{_ranges(numbers)}{tail}")
        for (head, tail), numbers in numbers_of.items()
    ]


def arrows(pairs: Mapping[str, str]) -> Iterator[str]:
    """Yield texts "old → new" of pairs of names, joined to ranges; "old" alone if new is ""."""
    # Pairs with equal texts around an equal number form a range: h.0 → layers.0, h.1 → layers.1
    # become "h.0-1 → layers.0-1"; h.0 → layers.5 stays a pair of its own.
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for old, new in pairs.items():
        source, target = _split_at_first_number(old), _split_at_first_number(new)
        is_run = source[1] == target[1]
        key = (source[0], source[2], target[0], target[2]) if is_run else (old, new)
        groups.setdefault(key, {})[old] = new
    for group in groups.values():
        right = shorten(group.values()) if any(group.values()) else ""
        yield shorten(group) + (f" → {right}" if right else "")


def corrections(faults: Faults) -> list[str]:
    """List unknown names, each with an arrow to the most similar real name, if any."""
    nearest = {name: [*faults.nearest.get(name, ()), ""][0] for name in faults.unknown}
    return list(arrows(nearest))


def listed(texts: list[str], separator: str = ", ") -> str:
    """Join texts; of more than `_MOST_RUNS` the first ones, and the number of the rest."""
    rest = [f"and {len(texts) - _MOST_RUNS} more"] if len(texts) > _MOST_RUNS else []
    return separator.join([*texts[:_MOST_RUNS], *rest])


def printable_name(name: str) -> str:
    """Escape and shorten a name for messages, because a map may contain any text."""
    safe = name if name.isprintable() and name == name.strip() and name else ascii(name)
    return safe if len(safe) <= _LONGEST_NAME else safe[: _LONGEST_NAME - 1] + "…"


def _split_at_first_number(name: str) -> tuple[str, int | None, str]:
    """Split a name at its first number: the text before, the number or None, the text after."""
    parts = name.split(".")
    for place, part in enumerate(parts):
        # A number with leading zeros ("007") isn't part of a range.
        if _is_number(part) and len(part) < 10 and str(int(part)) == part:
            head, tail = ".".join(parts[:place]), ".".join(parts[place + 1 :])
            return f"{head}." if place else "", int(part), f".{tail}" if tail else ""
    return name, None, ""


def _ranges(numbers: list[int]) -> str:
    # [0, 1, 2, 5, 7, 8] breaks at indices 3 and 4: "0-2,5,7-8".
    ordered = sorted(set(numbers))
    breaks = [i for i, (a, b) in enumerate(pairwise(ordered), start=1) if b != a + 1]
    groups = [ordered[i:j] for i, j in pairwise([0, *breaks, len(ordered)])]
    return ",".join(f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups)

"""Long lists of names in few words; everything stays told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from duoka.errors import Faults

_LONGEST_NAME = 120
_MOST_RUNS = 60


def shorten(names: Iterable[str]) -> str:
    """Write names with those that differ in one number as a run.

    Examples
    --------
    >>> shorten(["embed", "layers.0.norm", "layers.1.norm", "layers.2.norm", "layers.7.norm"])
    'embed, layers.0-2,7.norm'
    """
    return listed(runs(names))


def runs(names: Iterable[str]) -> list[str]:
    """The same as a list."""
    found: dict[tuple[str, str | None], list[int]] = {}
    for name in names:
        head, number, tail = _parted(name)
        if number is None:
            found[name, None] = []
        else:
            found.setdefault((head, tail), []).append(number)
    return [
        shown(head) if tail is None else shown(f"{head}{_ranges(numbers)}{tail}")
        for (head, tail), numbers in found.items()
    ]


def arrows(pairs: Mapping[str, str]) -> Iterator[str]:
    """Write what each name becomes, runs beside runs; a name that becomes nothing stands alone."""
    found: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
    for old, new in pairs.items():
        before, after = _parted(old), _parted(new)
        key = (before[0], before[2], after[0], after[2]) if before[1] == after[1] else (old, new)
        group = found.setdefault(key, ([], []))
        group[0].append(old)
        group[1].append(new)
    for olds, news in found.values():
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

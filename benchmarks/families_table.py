"""The rows of `check.py families` as the tables of a kept result."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterator, Sequence
from typing import Any


def checks_of(row: dict[str, Any], made: str) -> list[dict[str, Any]]:
    return [each for each in row["checks"] if each["map"] == made]


def markdown(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    rows = sorted(rows, key=lambda row: (row["kind"], row["name"]))
    built = [row for row in rows if row.get("step") not in ("build", "inputs")]
    runs = [row for row in built if any(each["ok"] for each in checks_of(row, "whole"))]
    whole = [row for row in runs if row["kept whole"]]
    yield "| | causal | image-text |"
    yield "|---|---|---|"
    for what, chosen in (
        ("architectures of transformers", rows),
        ("built at tiny size, with inputs", built),
        ("run on one GPU, generating or training", runs),
        ("split into blocks by duoka", [row for row in runs if checks_of(row, "own")]),
        ("own placement clean wherever one GPU runs", [r for r in runs if _clean(r, "own")]),
        ("split by accelerate", [row for row in runs if checks_of(row, "accelerate")]),
        (
            "accelerate's map clean wherever one GPU runs",
            [r for r in runs if _clean(r, "accelerate")],
        ),
    ):
        counts = [sum(row["kind"] == kind for row in chosen) for kind in ("causal", "image")]
        yield f"| {what} | {counts[0]} | {counts[1]} |"
    checks = [each for row in built for each in row["checks"]]
    seconds = [each["seconds"] for each in checks]
    yield ""
    yield f"{len(checks)} checks, {statistics.median(seconds):.2f} s in the median, "
    yield f"{sum(seconds) / 60:.0f} minutes together."
    yield from _section("Own placements that are not clean", _unclean(runs))
    yield from _section("Faults on own placements", _faults(runs, "own"))
    yield from _section(
        "Faults on accelerate's maps, decoder layers kept whole", _faults(whole, "accelerate")
    )
    cut = [row for row in runs if not row["kept whole"]]
    yield from _section(
        "Faults on accelerate's maps, where the class keeps nothing whole",
        _faults(cut, "accelerate"),
    )
    yield from _section("Beside accelerate's own dispatch", _agreement(runs))
    yield from _section("Stopped on one GPU too", _stops(built))
    yield from _section("Not built or without inputs", _unbuilt(rows))


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    yield ""
    yield f"## {title}"
    yield ""
    yield from lines


def _works(row: dict[str, Any]) -> set[bool]:
    """Whether it generates and trains on one device."""
    return {each["train"] for each in checks_of(row, "whole") if each["ok"]}


def _clean(row: dict[str, Any], made: str) -> bool:
    """Whether every split is clean of what runs whole."""
    found = [each for each in checks_of(row, made) if each["train"] in _works(row)]
    return bool(found) and all(each["ok"] for each in found)


def _unclean(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        found = [each for each in checks_of(row, "own") if each["train"] in _works(row)]
        wrong = [each for each in found if not each["ok"]]
        if wrong:
            places = {fault["at"] for each in wrong for fault in each["faults"]}
            stops = {each["stop"] for each in wrong if each["stop"]}
            what = "; ".join(sorted(places | stops))
            yield f"- {row['kind']} {row['name']}: {len(wrong)} of {len(found)}: {what}"


def _faults(rows: Sequence[dict[str, Any]], made: str) -> Iterator[str]:
    met: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = collections.defaultdict(list)
    for row in rows:
        for each in checks_of(row, made):
            for fault in each["faults"]:
                met[fault["at"], fault["op"]].append((row["name"], fault))
    families = {name for found in met.values() for name, _ in found}
    yield f"{len(met)} places, met in {len(families)} families."
    yield ""
    yield "| place | operation | source | operands | families |"
    yield "|---|---|---|---|---|"
    for (at, op), found in sorted(met.items()):
        names = ", ".join(dict.fromkeys(name for name, _ in found))
        first = found[0][1]
        source = first["source"][:90].replace("|", "\\|")
        operands = "; ".join(first["devices"])[:160].replace("|", "\\|")
        place = at.removeprefix("transformers/").removeprefix("models/")
        yield f"| {place} | {op} | `{source}` | {operands} | {names} |"


def _agreement(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """One call with accelerate's hooks on virtual GPUs, and what the check says of that call."""
    counts: dict[tuple[bool, bool], int] = collections.Counter()
    odd: dict[str, int] = collections.Counter()
    for row in rows:
        for each in checks_of(row, "accelerate"):
            if each["train"] not in _works(row):
                continue
            faulty = any(fault["phase"] != "decode" for fault in each["faults"])
            raises = bool(each["raised"])
            counts[faulty, raises] += 1
            if faulty != raises:
                where = ", ".join(sorted({fault["at"] for fault in each["faults"]})) or "clean"
                odd[f"{row['name']}: check {where}; accelerate {each['raised'] or 'runs'}"] += 1
    yield f"Both find nothing: {counts[False, False]}. Both find something: {counts[True, True]}."
    yield f"Only the check does: {counts[True, False]}. Only accelerate: {counts[False, True]}."
    yield ""
    for what, times in odd.items():
        yield f"- {what} ({times} times)"


def _stops(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        for each in checks_of(row, "whole"):
            if not each["ok"]:
                what = "training" if each["train"] else "generating"
                yield f"- {row['kind']} {row['name']}, {what}: {each['stop'][:200]}"
        if "error" in row:
            yield f"- {row['kind']} {row['name']}: {row['error'][:200]}"


def _unbuilt(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for row in rows:
        if row.get("step") in ("build", "inputs"):
            error = " ".join(row["error"].split())[:160]
            yield f"- {row['kind']} {row['name']}, {row['step']}: {error}"

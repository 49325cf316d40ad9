"""The corpus of seeded faults: what is found, what is missed, what is repaired and proved.

    python benchmarks/check_corpus.py [FOLDER …] [--only TEXT] [--markdown FILE] [--json FILE]

Each case of `tests/checker/corpus` (or of another FOLDER in the same form) is checked and repaired.
A fault is a marked line; it is found when the report names that line, in that file, as a fault.
A report on a line without a marker is an extra, whether as a fault or as a warning.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import seeded

import duoka


@dataclass(frozen=True)
class Row:
    """One file: numbers of lines, and what became of them."""

    name: str
    expected: int
    found: int = 0
    extra: int = 0
    repaired: bool | None = None
    proved: bool | None = None
    seconds: float = 0.0
    note: str = ""


def measure(path: Path) -> Row:
    case = seeded.load(path)
    expected = {**case.marked("fault"), **case.marked("warning")}
    begin = time.perf_counter()
    try:
        report = duoka.check(case.build(), case.placement, inputs=case.inputs(), train=case.train)
    except Exception as error:  # whatever it is, the next file is measured
        return Row(path.stem, len(expected), note=f"check: {type(error).__name__}: {error}")
    seconds = time.perf_counter() - begin
    faults = set(seeded.lines_of(report.faults))
    warned = set(seeded.lines_of(report.warnings))
    found = {line for line in case.marked("fault") if line in faults}
    found |= {line for line in case.marked("warning") if line in warned}
    allowed = expected.keys() | case.marked("origin").keys()
    extra = (faults | warned) - allowed
    note = "" if report.stop is None else f"stopped: {report.stop.message}"
    row = Row(path.stem, len(expected), len(found), len(extra), seconds=seconds, note=note)
    return _repaired(row, report) if case.marked("fault") else row


def _repaired(row: Row, report: duoka.Report) -> Row:
    values = {**vars(row), "repaired": False, "proved": False}
    try:
        repairs = duoka.repair(report)
    except Exception as error:  # as above
        return Row(**{**values, "note": f"repair: {type(error).__name__}: {error}"})
    values["repaired"] = bool(repairs) and not repairs.uncured
    values["proved"] = values["repaired"] and repairs.proved
    if not values["proved"] and not row.note:
        reasons = [reason for _, reason in repairs.uncured] + [each.reason for each in repairs]
        values["note"] = "; ".join(reason for reason in reasons if reason)
    return Row(**values)


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| file | expected | found | extra | repaired | proved | check, s | note |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        answers = [_said(row.repaired), _said(row.proved)]
        cells = [row.name, row.expected, row.found, row.extra, *answers, f"{row.seconds:.2f}"]
        yield "| " + " | ".join(str(cell) for cell in [*cells, row.note[:200]]) + " |"


def _said(answer: bool | None) -> str:
    return "" if answer is None else "yes" if answer else "no"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    expected = sum(row.expected for row in rows)
    found, extra = sum(row.found for row in rows), sum(row.extra for row in rows)
    faulty = [row for row in rows if row.repaired is not None]
    clean = [row for row in rows if not row.expected]
    yield f"{len(rows)} files, {len(clean)} of them clean; {expected} marked lines"
    yield f"recall {found}/{expected} = {found / max(expected, 1):.3f}"
    yield f"precision {found}/{found + extra} = {found / max(found + extra, 1):.3f}"
    quiet = sum(not row.extra and not row.note for row in clean)
    yield f"clean files without any report: {quiet}/{len(clean)}"
    yield f"files repaired: {sum(bool(row.repaired) for row in faulty)}/{len(faulty)}"
    yield f"files proved: {sum(bool(row.proved) for row in faulty)}/{len(faulty)}"
    yield f"all checks took {sum(row.seconds for row in rows):.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[seeded.CORPUS])
    parser.add_argument("--only", default="", help="files whose names contain this text")
    parser.add_argument("--markdown", type=Path, help="write the table to this file as well")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
    paths = [path for folder in options.folders for path in seeded.paths(folder)]
    rows = []
    for path in paths:
        if options.only in path.stem:
            rows.append(measure(path))
            print(*list(table(rows[-1:]))[2:], flush=True)
    print(*summary(rows), sep="\n")
    if options.markdown is not None:
        lines = [*summary(rows), "", *table(rows)]
        options.markdown.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json.dumps([vars(row) for row in rows]))


if __name__ == "__main__":
    main()

"""A few cells of the planner's benchmark: its own exhaustive search, and no miss of duoka's."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
Row = dict[str, Any]


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The benchmark's modules, which aren't part of the package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    names = ("planner_cells", "planner_contexts", "planner_referee")
    return {name: importlib.import_module(name) for name in names}


@pytest.fixture
def rows(benchmark: dict[str, ModuleType], tmp_path: Path) -> list[Row]:
    cells = benchmark["planner_cells"]
    subject = cells.Subject.of("qwen3-8b", tmp_path)
    machines = ["8 + 12 + 24", "3 x 12", "2 x 24, the first busy", "8 x 12", "24 + 12"]
    sizes = [(8192, 1), (32768, 1), (8192, 16)]
    return [
        row
        for context, batch in sizes
        for row in cells.judge(subject, cells.workload_of(context, batch), machines)
    ]


def test_duoka_solves_what_fits_on_as_few_gpus_as_can_be(rows: list[Row]) -> None:
    assert [row["duoka"] for row in rows] == [row["fewest"] for row in rows]
    assert {1, 2} <= {row["fewest"] for row in rows}
    assert None in {row["fewest"] for row in rows}


def test_what_auto_holds_fits_as_well(rows: list[Row]) -> None:
    held = [row for row in rows if row["auto"] is not None]
    assert held
    assert all(row["fewest"] is not None for row in held)
    assert any(row["fewest"] is not None and row["auto"] is None for row in rows)


def test_the_longest_context_is_that_of_the_best_split(
    benchmark: dict[str, ModuleType], tmp_path: Path
) -> None:
    subject = benchmark["planner_cells"].Subject.of("llama-2-13b", tmp_path)
    (row,) = benchmark["planner_contexts"].contexts(subject, ["24 + 12"])
    assert row["duoka"] == row["best"] == row["limit"] > row["auto"]


def test_the_savings_of_the_exhaustive_search_are_right(
    benchmark: dict[str, ModuleType], tmp_path: Path
) -> None:
    cells, referee = benchmark["planner_cells"], benchmark["planner_referee"]
    subject = cells.Subject.of("qwen3-8b", tmp_path)
    audit = referee.Audit(1)
    for one in referee.Bench(subject.profile, cells.workload_of(8192, 4)).referees[:2]:
        audit.draw(one, [8 * 2**30, 12 * 2**30], 8)
    assert audit.drawn == 16
    assert not audit.told

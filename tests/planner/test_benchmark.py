"""A few cells of the planner's benchmark: its own exhaustive search, and no miss of duoka's."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
pytestmark = pytest.mark.slow
MACHINES = ["8 + 12 + 24", "3 x 12", "1 x 24", "24 + 12"]


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The benchmark's modules, which aren't part of the package, and one model."""
    names = ("auto", "cells", "contexts", "measure", "models", "referee")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        found = SimpleNamespace(**{n: importlib.import_module(f"planner_{n}") for n in names})
        found.optimality = importlib.import_module("optimality")
        found.profiles = importlib.import_module("optimality_profiles")
        found.subject = found.cells.Subject.of("llama-3.2-3b", tmp_path_factory.mktemp("configs"))
        found.rows = [
            row
            for batch in (1, 16)
            for row in found.cells.judge(
                found.subject, found.cells.workload_of(8192, batch), MACHINES
            )
        ]
        yield found


def test_duoka_solves_what_fits_on_as_few_gpus_as_can_be(planner: SimpleNamespace) -> None:
    rows: list[dict[str, Any]] = planner.rows
    assert [row["duoka"] for row in rows] == [row["fewest"] for row in rows]
    assert {1, 2} <= {row["fewest"] for row in rows}


def test_placements_run_on_virtual_gpus_as_forecast(planner: SimpleNamespace) -> None:
    rows = planner.measure.measure_some(
        planner.subject, planner.rows[1:2], random.Random(1), share=1.0
    )
    own, *_, auto = rows
    assert (own["allocated"], own["reserved"]) == (
        own["forecast_allocated"],
        own["forecast_reserved"],
    )
    assert auto["fits"] == auto["forecast_fits"]


def test_the_search_and_the_planner_equal_brute_force(planner: SimpleNamespace) -> None:
    for run, number in ((planner.optimality.run_tables, 60), (planner.optimality.run_profiles, 30)):
        counts, different = run(number, seed=7)
        assert counts["cases"] == number > counts["fit"] / 5 > 0
        assert not different


@pytest.mark.parametrize("number", [468, 2453])
def test_stages_that_fragment_less_than_short_replays_say_are_planned(
    planner: SimpleNamespace, number: int
) -> None:
    """Cases in which a replay of the first and last steps alone refused what holds."""
    case = planner.profiles.planned_case(random.Random(f"20261121 profiles {number}"))
    assert case.fits
    assert not case.difference

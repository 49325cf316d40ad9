from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from staged import WORKLOAD, placed, staged

from duoka import compare
from duoka.errors import UsageError
from duoka.forecast.latency import Seconds, StageSeconds
from duoka.forecast.workload import Training
from duoka.planner.compare import Comparison
from duoka.report.terminal import render_comparison


def printed(comparison: Comparison, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render_comparison(comparison, ("a.plan", "b.plan")))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_plan_differs_in_nothing_from_itself() -> None:
    plan = staged([3, 2])
    found = compare(plan, plan)
    assert found.same
    assert found.moves == ()
    assert printed(found) == "the plans are equal\n"


def test_what_differs_comes_first() -> None:
    plan = staged([3, 2])
    other = replace(
        staged([3, 2], gpus="24GiB,24GiB"), workload=replace(WORKLOAD, batch=4), objective="latency"
    )
    found = compare(plan, other)
    assert {each.what: (each.first, each.second) for each in found.differences} == {
        "GPUs": ("24GiB,12GiB,8GiB,8GiB", "24GiB,24GiB"),
        "batch": ("1", "4"),
        "objective": ("headroom", "latency"),
    }
    lines = printed(found).splitlines()
    assert lines[0].split() == ["differs", "a.plan", "b.plan"]
    assert "cuda:0: the same, 1.25 GiB of 24.00 GiB" in lines


def test_modules_that_moved_are_named() -> None:
    plan = staged([3, 2])
    found = compare(plan, placed(plan, model__layers__2="cuda:1"))
    (move,) = found.moves or ()
    assert (move.source, move.target, move.modules) == ("cuda:0", "cuda:1", ("model.layers.2",))
    assert "cuda:0 → cuda:1: 1 module: layers.2" in printed(found)
    assert compare(plan, staged([4, 2])).moves is None


@pytest.mark.parametrize("width", [40, 80, 120])
def test_bytes_stand_side_by_side(width: int) -> None:
    found = compare(staged([3, 2]), staged([5], gpus="24GiB"))
    text = printed(found, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    assert "weights 768.00 MiB 1.25 GiB (+512.00 MiB)" in words or width < 80
    assert "not used" in words


def test_seconds_are_told_where_they_are_known() -> None:
    assert compare(staged([3]), staged([3])).seconds == ()
    stage = StageSeconds(
        device="vgpu:0",
        prefill_seconds=2.0,
        decode_seconds=1.0,
        prefill_transfer_seconds=0.0,
        decode_transfer_seconds=0.0,
    )
    seconds = Seconds(
        stages=(stage,),
        total_seconds=3.0,
        slowest_seconds=3.0,
        first_token_seconds=2.0,
        token_seconds=0.5,
        tokens_per_second=1.25,
    )
    timed = replace(staged([3]), forecast=replace(staged([3]).forecast, seconds=seconds))
    found = compare(staged([3]), timed)
    assert found.seconds == (
        ("total_seconds", None, 3.0),
        ("slowest_seconds", None, 3.0),
        ("first_token_seconds", None, 2.0),
        ("token_seconds", None, 0.5),
        ("tokens_per_second", None, 1.25),
    )
    text = " ".join(printed(found, 80).split())
    assert "total time unknown 3.00 s" in text
    assert "tokens per second unknown 1.2" in text


def test_training_and_generating_are_no_pair() -> None:
    train = replace(staged([3]), workload=replace(WORKLOAD, new_tokens=0, training=Training()))
    with pytest.raises(UsageError, match="first plan is for training and the second one for gen"):
        compare(train, staged([3]))
    assert compare(train, train).same

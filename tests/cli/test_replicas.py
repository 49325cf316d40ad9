from __future__ import annotations

import json
from pathlib import Path

import pytest

import duoka
from duoka.cli.replicas import read_number
from duoka.errors import UsageError

from .conftest import SIZES, Program


def test_copies_are_shown_and_kept_one_by_one(tiny: Path, program: Program, tmp_path: Path) -> None:
    saved = tmp_path / "chat.plan"
    options = ("--gpus", "virtual:3x64MiB", *SIZES, "--replicas", "2")
    done = program("plan", tiny, *options, "--save", saved)
    assert done.returncode == 0
    assert "2 copies: at least" in done.stdout
    assert "unused: vgpu:2" in done.stdout
    # One table for copies that differ in their GPU alone.
    assert "replica 1 of 2, identical ones: replica 2 on vgpu:1" in done.stdout
    assert done.stdout.count("budget") == 1
    plans = [duoka.Plan.load(tmp_path / f"chat-{number}.plan") for number in (1, 2)]
    assert [plan.devices for plan in plans] == [("vgpu:0",), ("vgpu:1",)]
    told = json.loads(program("plan", tiny, *options, "--json").stdout)
    assert [plan["binding_device"] for plan in told["plans"]] == ["vgpu:0", "vgpu:1"]


def test_what_is_demanded_is_kept(tiny: Path, program: Program, tmp_path: Path) -> None:
    saved = tmp_path / "demands.plan"
    program(
        *("plan", tiny, "--gpus", "virtual:2x64MiB", *SIZES, "--pin", "lm_head=1"),
        *("--reserve", "0=8MiB", "--save", saved),
    )
    plan = duoka.Plan.load(saved)
    assert plan.device_map["lm_head"] == "vgpu:1"
    assert plan.fleet.device("vgpu:0").budget_bytes == 56 * 2**20
    again = program("plan", "--plan", saved, "--replan", "--json")
    assert duoka.Plan.from_json(again.stdout).request == plan.request
    assert duoka.Plan.load(saved) == plan


def test_the_largest_context_is_planned(tiny: Path, program: Program) -> None:
    done = program("plan", tiny, "--gpus", "virtual:64MiB", "--max-context", "--json")
    plan = duoka.Plan.from_json(done.stdout)
    assert (plan.request.largest, plan.workload.context_tokens) == ("context", 1024)


@pytest.mark.parametrize("text", ["", "0", "two", "-1", "1.5", "99999", "٣"])
def test_numbers_of_copies(text: str) -> None:
    assert read_number("3") == 3
    with pytest.raises(UsageError, match="not a number of replicas"):
        read_number(text)

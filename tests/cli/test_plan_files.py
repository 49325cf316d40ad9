from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recordings import replay

import duoka
from duoka import Device, Fleet, Plan
from duoka.errors import FleetError
from duoka.runtime import devices
from duoka.tools.demo.checkpoint import fresh_model, write_frame, write_weights

from .conftest import GPUS, SIZES, TINY, Program


@pytest.fixture
def saved(tiny: Path, program: Program, tmp_path: Path) -> Path:
    file = tmp_path / "tiny.plan"
    done = program("plan", tiny, *GPUS, *SIZES, "--save", file)
    assert done.returncode == 0, done.stderr
    return file


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def make_another(directory: Path) -> Path:
    config = {**TINY, "num_layers": 2}
    write_frame(directory, config)
    with torch.random.fork_rng(devices=[]):
        write_weights(directory, config, fresh_model(config))
    return directory


def test_a_plan_is_looked_at_without_its_checkpoint(saved: Path, program: Program) -> None:
    edit(saved, lambda data: data.update(source="/gone"))
    assert program("plan", "--plan", saved).returncode == 0
    done = program("generate", "--plan", saved, "-p", "hello")
    assert (done.returncode, done.stdout) == (4, "")
    assert "/gone" in done.stderr


def test_a_plan_for_another_checkpoint_is_refused(
    saved: Path, program: Program, tmp_path: Path
) -> None:
    other = make_another(tmp_path / "other")
    before = saved.read_bytes()
    for command in (["plan"], ["generate", "-p", "hello"]):
        done = program(*command, other, "--plan", saved)
        assert (done.returncode, done.stdout) == (10, "")
        assert "or has changed; different" in done.stderr
        assert "--replan" in done.stderr
    assert saved.read_bytes() == before


@pytest.mark.slow
def test_replan_asks_again_what_was_asked(saved: Path, program: Program, tmp_path: Path) -> None:
    first = Plan.load(saved)
    other = make_another(tmp_path / "other")
    done = program("plan", other, "--plan", saved, "--replan")
    assert done.returncode == 0, done.stderr
    assert f"saved to {saved}" in done.stderr
    again = Plan.load(saved)
    assert again.source == str(other)
    assert again.fingerprint != first.fingerprint
    assert again.request == first.request
    assert again.workload == first.workload
    assert program("plan", other, "--plan", saved).stdout == done.stdout


def test_replan_asks_for_the_dtype_that_was_asked_for(saved: Path, tiny: Path) -> None:
    plan = Plan.load(saved)
    assert (plan.request.workload.dtype, plan.workload.dtype) == ("auto", "float32")


def test_a_saved_plan_serves_in_any_directory(
    tiny: Path, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny.parent)
    saved = tmp_path / "plan"
    assert program("plan", tiny.name, *GPUS, *SIZES, "--save", saved).returncode == 0
    monkeypatch.chdir(tmp_path)
    assert program("generate", "--plan", "plan", "-p", "hello").returncode == 0


def test_replan_and_run(saved: Path, tiny: Path, program: Program) -> None:
    edit(saved, lambda data: data.update(value=-1.0))
    done = program("generate", "--plan", saved, "--replan", "-p", "hello", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answers"]
    assert Plan.load(saved).value > 0


@pytest.mark.slow  # what would fit instead is traced, too
def test_a_plan_that_fits_no_more_stays_as_it_was(
    saved: Path, program: Program, tmp_path: Path
) -> None:
    edit(saved, lambda data: data["request"].update(gpus="virtual:1MiB"))
    before = saved.read_bytes()
    done = program("plan", "--plan", saved, "--replan")
    assert done.returncode == 7
    assert saved.read_bytes() == before


# ── GPUs that have an identity ──


def found(*budgets_mib: tuple[str, int]) -> Fleet:
    return Fleet(
        devices=tuple(
            Device(name=f"cuda:{index}", uuid=uuid, budget_bytes=mib * 2**20)
            for index, (uuid, mib) in enumerate(budgets_mib)
        )
    )


@pytest.fixture
def detect(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fleet], None]:
    """Let these be the GPUs that are there."""
    parse = Fleet.parse

    def be_there(fleet: Fleet) -> None:
        monkeypatch.setattr(Fleet, "detect", lambda which=None: fleet)
        monkeypatch.setattr(Fleet, "parse", lambda text: fleet if text == "all" else parse(text))

    return be_there


def test_gpus_that_are_gone_or_too_full_are_told_and_replanned(
    tiny: Path, program: Program, tmp_path: Path, detect: Callable[[Fleet], None]
) -> None:
    file = tmp_path / "plan"
    detect(found(("GPU-a", 64), ("GPU-b", 64)))
    assert program("plan", tiny, *SIZES, "--save", file).returncode == 0
    assert Plan.load(file).fleet.devices[0].uuid == "GPU-a"

    detect(found(("GPU-b", 64), ("GPU-c", 64)))
    done = program("generate", "--plan", file, "-p", "hello")
    assert (done.returncode, done.stdout) == (3, "")
    assert "GPU-a is missing" in done.stderr

    detect(found(("GPU-b", 64), ("GPU-a", 1)))
    done = program("generate", "--plan", file, "-p", "hello")
    assert done.returncode == 3
    assert "has 1.00 MiB available, and the plan needs" in done.stderr

    done = program("plan", "--plan", file, "--replan")
    assert done.returncode == 0, done.stderr
    assert [device.uuid for device in Plan.load(file).fleet.devices] == ["GPU-b", "GPU-a"]
    assert Plan.load(file).devices == ("cuda:0",)


def test_replan_takes_no_other_gpus_than_were_given(
    tiny: Path, program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay(monkeypatch, "eight-3090")
    file = tmp_path / "plan"
    chosen = Fleet.detect("2,3")
    duoka.plan(tiny, chosen, duoka.Workload(prompt_tokens=8, new_tokens=4)).save(file)
    assert Plan.load(file).request.gpus == ""
    replay(monkeypatch, "eight-3090", visible=[7, 3, 2, 0])
    done = program("plan", "--plan", file, "--replan")
    assert done.returncode == 0, done.stderr
    again = Plan.load(file).fleet
    assert again.names == ("cuda:2", "cuda:1")
    assert [device.uuid for device in again.devices] == [each.uuid for each in chosen.devices]
    assert program("plan", tiny, *SIZES, "--save", file).returncode == 0
    assert Plan.load(file).request.gpus == "all"


def test_a_plan_from_another_machine_tells_what_is_here(
    saved: Path, tiny: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay(monkeypatch, "eight-3090")
    assert program("plan", tiny, *SIZES, "--gpus", "1", "--save", saved).returncode == 0
    there = Plan.load(saved).fleet.devices[0]
    recording = replay(monkeypatch, "fastest-first", visible=[1, 0])
    done = program("generate", "--plan", saved, "-p", "hello")
    assert (done.returncode, done.stdout) == (3, "")
    assert f"cuda:1 NVIDIA GeForce RTX 3090 {there.uuid} is missing" in done.stderr
    assert "or use --replan with a saved plan" in done.stderr
    assert f"cuda:0  NVIDIA GeForce RTX 4090  {recording.uuids[1]}  has a budget of" in done.stderr


def test_memory_is_given_back_before_it_is_measured(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(devices, "give_back", lambda: calls.append("give back"))

    def measure(self: Plan) -> Plan:
        calls.append("measure")
        raise FleetError("no further")

    monkeypatch.setattr(Plan, "on_this_machine", measure)
    with pytest.raises(FleetError, match="no further"):
        duoka.load(Plan.load(saved))
    assert calls == ["give back", "measure"]

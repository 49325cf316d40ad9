"""Maps by hand on the command line: refused with every name, completed, saved, and used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from progress import without_progress

import duoka

from .conftest import SIZES, Program

FLEET = ("--gpus", "virtual:3x64MiB")
WORDS = "transformer.embedding.word_embeddings"
ROTARY = "transformer.rotary_pos_emb"
LAYERS = "transformer.encoder.layers"
NORM = "transformer.encoder.final_layernorm"
HEAD = "transformer.output_layer"
COMPLETE = {
    WORDS: 0,
    ROTARY: 0,
    f"{LAYERS}.0": 0,
    f"{LAYERS}.1": 1,
    f"{LAYERS}.2": 2,
    NORM: 0,
    HEAD: 0,
}
NATIVE = {
    "model.embed_tokens": "vgpu:0",
    "model.rotary_emb": "vgpu:0",
    "model.layers.0": "vgpu:0",
    "model.layers.1": "vgpu:1",
    "model.layers.2": "vgpu:2",
    "model.norm": "vgpu:0",
    "lm_head": "vgpu:0",
}
FIRST = {
    "transformer.word_embeddings": 0,
    "transformer.layers.0": 0,
    "transformer.layers.1": 1,
    "transformer.layers.2": 2,
    "transformer.final_layernorm": 0,
    "lm_head": 0,
}
Write = Callable[[Any], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(content: Any) -> Path:
        path = tmp_path / "map.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return written


def test_a_map_is_planned(tiny: Path, program: Program, write: Write, tmp_path: Path) -> None:
    saved = tmp_path / "as-planned.json"
    done = program(
        "plan", tiny, *FLEET, *SIZES, "--device-map", write(COMPLETE), "--save-device-map", saved
    )
    assert (done.returncode, without_progress(done.stderr)) == (0, f"saved to {saved}\n")
    assert "device map" in done.stdout
    assert "cross devices 3 times" in " ".join(done.stdout.split())
    assert json.loads(saved.read_text()) == NATIVE
    again = program("plan", tiny, *FLEET, *SIZES, "--device-map", saved)
    assert again.stdout == done.stdout


def test_what_is_wrong_is_told_and_the_completed_map_saved(
    tiny: Path, program: Program, write: Write, tmp_path: Path
) -> None:
    saved = tmp_path / "completed.json"
    done = program(
        "plan", tiny, *FLEET, *SIZES, "--device-map", write(FIRST), "--save-device-map", saved
    )
    assert (done.returncode, done.stdout) == (6, "")
    assert f"no device for: {WORDS}, {ROTARY}, {LAYERS}.0-2, {NORM}" in done.stderr
    assert f"transformer.layers.0-2 → {LAYERS}.0-2" in done.stderr
    assert f"--device-map {saved}" in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(saved.read_text()) == COMPLETE
    again = program("plan", tiny, *FLEET, *SIZES, "--device-map", saved, "--json")
    assert duoka.Plan.from_json(again.stdout).device_map == NATIVE


def test_json_tells_every_name(tiny: Path, program: Program, write: Write) -> None:
    done = program("plan", tiny, *FLEET, *SIZES, "--device-map", write(FIRST), "--json")
    assert done.returncode == 6
    told = json.loads(done.stdout)
    assert set(told) == {
        "missing", "unknown", "doubled", "split", "misplaced", "nearest", "completed",
    }  # fmt: skip
    assert len(told["missing"]) == 3 + 3 * 7
    assert told["unknown"] == [name for name in FIRST if name != "lm_head"]
    assert told["nearest"]["transformer.layers.1"] == [f"{LAYERS}.1"]
    assert told["completed"] == COMPLETE


@pytest.mark.slow
def test_what_does_not_fit(tiny: Path, program: Program, write: Write) -> None:
    small = ("--gpus", "virtual:64MiB,1MiB")
    device_map = write({"": 1})
    done = program("plan", tiny, *small, *SIZES, "--device-map", device_map)
    assert done.returncode == 7
    assert "vgpu:1 needs" in done.stderr
    assert "duoka's plan instead of the map" in done.stderr


def test_options_that_contradict_a_map(tiny: Path, program: Program, write: Write) -> None:
    path = write(COMPLETE)
    for extra in (("--use-all",), ("--objective", "headroom")):
        done = program("plan", tiny, *FLEET, *SIZES, "--device-map", path, *extra)
        assert done.returncode == 2
        assert "have no effect" in done.stderr


def test_a_saved_plan_of_a_map_is_made_again(
    tiny: Path, program: Program, write: Write, tmp_path: Path
) -> None:
    plan = tmp_path / "kept.plan"
    program("plan", tiny, *FLEET, *SIZES, "--device-map", write(COMPLETE), "--save", plan)
    first = duoka.Plan.load(plan)
    assert (first.objective, first.device_map) == ("given", NATIVE)
    done = program("plan", "--plan", plan, "--replan")
    assert done.returncode == 0
    assert duoka.Plan.load(plan) == first


@pytest.mark.slow
def test_answers_are_the_same_wherever_modules_are(
    tiny: Path, program: Program, write: Write
) -> None:
    path = write({**COMPLETE, f"{LAYERS}.1": "cpu"})
    ask = ("--prompt", "hello", "--temperature", "0", "--json")
    one = program("generate", tiny, *FLEET, *SIZES, *ask)
    spread = program("generate", tiny, *FLEET, *SIZES, *ask, "--device-map", path)
    assert (one.returncode, spread.returncode) == (0, 0), spread.stderr
    assert json.loads(spread.stdout)["devices"] == ["vgpu:0", "cpu", "vgpu:2"]
    assert json.loads(spread.stdout)["answers"] == json.loads(one.stdout)["answers"]


def test_a_map_is_refused_before_anything_is_loaded(
    tiny: Path, program: Program, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("weights were asked for")

    monkeypatch.setattr("duoka.api.load.loader.load_weights", fail)
    incomplete = write({WORDS: 0})
    one = ("--gpus", "virtual:64MiB")
    for fleet in (FLEET, one):
        done = program("generate", tiny, *fleet, *SIZES, "-p", "x", "--device-map", incomplete)
        assert done.returncode == 6
        done = program("chat", tiny, *fleet, *SIZES, "--device-map", incomplete, stdin="hello\n")
        assert (done.returncode, done.stdout) == (6, "")
        assert f"{LAYERS}.0-2" in done.stderr

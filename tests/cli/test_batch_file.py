"""Files of prompts: each answered once, whenever a run was killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import tuning
from transformers import MambaConfig, MambaForCausalLM

from .conftest import MAIN, Program

LENGTHS = ["--context", "96", "--new-tokens", "24"]
SIZES = ["--gpus", "virtual:64MiB", *LENGTHS, "--batch", "4"]
PROMPTS = [f"{number}+{number}?" for number in range(24)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuning.write_model("shallow", tmp_path_factory.mktemp("model") / "llama")


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_every_prompt_is_answered_as_by_itself(
    model: Path, program: Program, tmp_path: Path
) -> None:
    rows = [
        PROMPTS[0],
        {"prompt": PROMPTS[1], "id": "second"},
        {"id": 3, "messages": [{"role": "user", "content": PROMPTS[2]}]},
    ]
    file, out = write(tmp_path / "prompts.jsonl", rows), tmp_path / "answers.jsonl"
    spread = ["--gpus", "virtual:2x64MiB", *LENGTHS]  # pages fill both, each with a process
    done = program("generate", model, *spread, "--file", file, "--out", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "busy: vgpu:0 " in done.stderr
    assert ", vgpu:1 " in done.stderr
    answers = {answer["number"]: answer for answer in read(out)}
    assert [answers[number].get("id") for number in range(3)] == [None, "second", 3]
    given = [part for question in PROMPTS[:3] for part in ("-p", question)]
    alone = program("generate", model, *SIZES, *given, "--json")
    expected = json.loads(alone.stdout)["answers"]
    for number, answer in enumerate(expected):
        assert answers[number]["answer"] == answer["text"]
        assert answers[number]["finish"] == answer["finish"]
        assert answers[number]["new_tokens"] == answer["new_tokens"]


def test_a_line_can_ask_for_its_own_form(model: Path, program: Program, tmp_path: Path) -> None:
    form = {"type": "regex", "regex": "yes|no"}
    rows = [{"prompt": PROMPTS[0], "response_format": form}, {"prompt": PROMPTS[1], "stop": ["\n"]}]
    file, out = write(tmp_path / "prompts.jsonl", rows), tmp_path / "answers.jsonl"
    done = program("generate", model, *SIZES, "--file", file, "--out", out)
    assert done.returncode == 0, done.stderr
    answers = {answer["number"]: answer for answer in read(out)}
    assert answers[0]["answer"] in ("yes", "no")
    assert answers[0]["finish"] == "stop"
    write(file, [{"prompt": "a", "top_k": "many"}])
    done = program("generate", model, *SIZES, "--file", file, "--out", tmp_path / "other.jsonl")
    assert done.returncode == 2
    assert "prompts.jsonl:1: its top_k is not a 64-bit integer" in done.stderr


def test_a_prompt_that_is_too_long_is_told_before_anything_is_loaded(
    model: Path, program: Program, tmp_path: Path
) -> None:
    rows = [PROMPTS[0], "long " * 15, PROMPTS[1]]
    file, out = write(tmp_path / "prompts.jsonl", rows), tmp_path / "answers.jsonl"
    sizes = ["--gpus", "virtual:64MiB", "--context", "128", "--new-tokens", "120", "--batch", "2"]
    done = program("generate", model, *sizes, "--file", file, "--out", out)
    assert done.returncode == 2
    assert "; the plan has memory for" in done.stderr
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.process
def test_a_run_goes_on_wherever_it_was_killed(
    model: Path, program: Program, tmp_path: Path, forking_python: Path
) -> None:
    file = write(tmp_path / "prompts.jsonl", PROMPTS)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "answers.jsonl"
    assert program("generate", model, *SIZES, "--file", file, "--out", whole).returncode == 0
    expected = sorted(read(whole), key=lambda answer: answer["number"])
    rng = random.Random(0)
    command = [str(forking_python), "-c", MAIN, "generate", str(model), *SIZES]
    command += ["--file", str(file), "--out", str(out)]
    kills = 0
    while kills < 3:
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        before = out.stat().st_size if out.exists() else 0
        while process.poll() is None and (not out.exists() or out.stat().st_size == before):
            time.sleep(0.005)
        time.sleep(rng.random() * 0.05)
        if process.poll() is not None:
            break
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()  # to the end of all that write there
        kills += 1
    assert kills
    done = program("generate", model, *SIZES, "--file", file, "--out", out)
    assert done.returncode == 0, done.stderr
    assert sorted(read(out), key=lambda answer: answer["number"]) == expected


@pytest.mark.slow
def test_what_has_no_pages_is_answered_in_batches(
    model: Path, program: Program, tmp_path: Path
) -> None:
    file = write(tmp_path / "prompts.jsonl", PROMPTS[:3])
    state = tmp_path / "mamba"
    shutil.copytree(model, state)
    config = {name: tuning.SIZES[name] for name in ("vocab_size", "hidden_size")}
    MambaForCausalLM(
        MambaConfig(**config, num_hidden_layers=2, state_size=4, eos_token_id=256)
    ).save_pretrained(state)
    sizes = ["--gpus", "virtual:64MiB", *LENGTHS]
    done = program("generate", state, *sizes, "--file", file, "--out", tmp_path / "state.jsonl")
    assert done.returncode == 0, done.stderr
    assert "MambaForCausalLM doesn't support a paged KV cache (3 prompts at a time)" in done.stderr
    assert len(read(tmp_path / "state.jsonl")) == 3


@pytest.mark.slow
def test_a_saved_plan_of_either_kind_answers(model: Path, program: Program, tmp_path: Path) -> None:
    file, kinds = write(tmp_path / "prompts.jsonl", PROMPTS[:3]), {}
    for name, kind in (("paged", ["--serve", "--cache", "int8"]), ("batch", ["--batch", "2"])):
        saved, out = tmp_path / f"{name}.plan", tmp_path / f"{name}.jsonl"
        asked = ["--gpus", "virtual:64MiB", *LENGTHS, *kind, "--save", saved]
        assert program("plan", model, *asked).returncode == 0
        done = program("generate", "--plan", saved, "--file", file, "--out", out)
        assert done.returncode == 0, done.stderr
        kinds[name] = {answer["number"]: answer["prompt_digest"] for answer in read(out)}
    assert len(kinds["paged"]) == 3
    assert kinds["paged"] == kinds["batch"]

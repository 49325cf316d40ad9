from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from progress import without_progress

import duoka

from .conftest import GPUS, SIZES, Program


def test_a_plan_is_shown(tiny: Path, program: Program) -> None:
    done = program("plan", tiny, *GPUS, *SIZES, "--use-all")
    assert (done.returncode, without_progress(done.stderr)) == (0, "")
    assert "vgpu:0" in done.stdout
    assert "context 96 (64 + 32 new)" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_json_is_the_plan(tiny: Path, program: Program, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    done = program("plan", tiny, *GPUS, *SIZES, "--json", "--save", saved)
    plan = duoka.Plan.from_json(done.stdout)
    assert plan == duoka.Plan.load(saved)
    assert plan.workload.context_tokens == 96
    assert json.loads(done.stdout)["workload"]["new_tokens"] == 32
    assert without_progress(done.stderr) == f"saved to {saved}\n"


def test_a_saved_plan_is_shown_again(tiny: Path, program: Program, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    first = program("plan", tiny, *GPUS, *SIZES, "--save", saved)
    assert program("plan", "--plan", saved).stdout == first.stdout
    assert program("plan", tiny, "--plan", saved).stdout == first.stdout


def test_defaults_keep_to_the_models_limit(tiny: Path, program: Program) -> None:
    done = program("plan", tiny, *GPUS, "--json")
    workload = json.loads(done.stdout)["workload"]
    assert workload["prompt_tokens"] + workload["new_tokens"] == 1024
    assert workload["new_tokens"] == 256


@pytest.mark.slow
def test_types_have_short_names(tiny: Path, program: Program) -> None:
    long = program("plan", tiny, *GPUS, *SIZES, "--dtype", "bfloat16")
    assert program("plan", tiny, *GPUS, *SIZES, "--dtype", "BF16").stdout == long.stdout
    assert long.stdout.splitlines()[1].startswith("bfloat16")


def test_a_config_that_is_not_of_the_weights_is_refused(
    tiny: Path, program: Program, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"ffn_hidden_size": 128}))
    done = program("plan", copy, *GPUS, *SIZES)
    assert (done.returncode, done.stdout) == (9, "")
    assert "tensors have a different shape" in done.stderr


# ── many requests ──


def test_a_plan_for_requests_counts_pages(tiny: Path, program: Program, tmp_path: Path) -> None:
    saved = tmp_path / "served.plan"
    asked = ["--gpus", "virtual:2x96MiB", "--serve", "--sequences", "3", "--context", "96"]
    done = program("plan", tiny, *asked, "--save", saved)
    assert (done.returncode, "pages of 16 tokens" in done.stdout) == (0, True)
    plan = duoka.Plan.load(saved)
    assert plan.workload.pages is not None
    assert f"{plan.workload.pages:,} pages" in done.stdout
    assert (plan.workload.batch, plan.objective) == (3, "pages")
    assert max(map(len, done.stdout.splitlines())) <= 80
    small = program("plan", tiny, *asked, "--cache", "int8", "--device-map", "auto", "--json")
    workload = duoka.Plan.from_json(small.stdout).workload
    assert workload.cache == "paged-int8"
    assert workload.pages is not None
    assert workload.pages > 1.5 * plan.workload.pages


@pytest.mark.slow
def test_what_serve_refuses_is_not_suggested_with_it(
    published_data: Path, program: Program, tmp_path: Path
) -> None:
    shutil.copy(published_data / "configs/glm-4-9b-chat.json", tmp_path / "config.json")
    done = program("plan", tmp_path, "--serve", "--gpus", "12GiB", "--context", "8K")
    assert done.returncode == 7
    assert "--serve --gpus 12GiB --context 8K --quantize int8" in done.stderr
    assert "--offload" not in done.stderr


def test_a_declared_host_changes_nothing_but_the_request(
    tiny: Path, program: Program, tmp_path: Path
) -> None:
    asked = ["plan", tiny, *GPUS, *SIZES]
    absent, declared = program(*asked), program(*asked, "--host-memory", "8GiB,50GB/s")
    assert (declared.returncode, declared.stdout) == (0, absent.stdout)
    plain = duoka.Plan.from_json(program(*asked, "--json").stdout)
    assert "host" not in json.loads(plain.to_json())["request"]
    saved = tmp_path / "host.plan"
    program(*asked, "--host-memory", "8GiB,50GB/s", "--save", saved)
    plan = duoka.Plan.load(saved)
    host = plan.request.host
    assert host is not None
    assert (host.budget_bytes, host.memory_bytes_per_second) == (8 * 2**30, 50e9)
    assert replace(plan, request=replace(plan.request, host=None)) == plain
    assert program("plan", "--plan", saved, tiny, "--replan").returncode == 0
    assert duoka.Plan.load(saved) == plan

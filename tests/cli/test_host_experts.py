"""What a user does with experts in host memory: plan, run, save, check and export."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import tuning

from .conftest import Program

CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": 3, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 256, "intermediate_size": 512,
    "max_position_embeddings": 4096,
}  # fmt: skip
OPTIONS = ("--context", "96", "--new-tokens", "16", "--dtype", "bfloat16", "--gpus")
SMALL = (*OPTIONS, "virtual:22MiB", "--host-memory", "1GiB,30GB/s")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuning.write_of_config(tmp_path_factory.mktemp("experts"), **CONFIG)


def test_a_plan_is_saved_checked_and_exported(
    experts: Path, program: Program, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    done = program("plan", experts, *SMALL, "--save", file)
    assert done.returncode == 0, done.stderr
    number = len(json.loads(file.read_text())["workload"]["host_experts"])
    assert number
    assert f"The experts of {number} layer" in done.stdout
    again = program("plan", "--plan", file, "--replan")
    assert again.stdout == done.stdout, again.stderr
    plan = json.loads(program("plan", "--plan", file, "--json").stdout)
    assert plan["forecast"]["expert_bytes"] == number * 16 * 3 * 256 * 256 * 2
    checked = program("check", "--plan", file, "--json")
    assert checked.returncode == 0, checked.stderr
    (memory,) = json.loads(checked.stdout)["memory"]
    (stage,) = plan["forecast"]["devices"]
    assert memory["reserved_bytes"] == stage["reserved_bytes"]
    exported = program("plan", "--plan", file, "--export", "llama.cpp")
    assert re.search(rf"--n-cpu-moe {number}\b", exported.stdout), exported.stderr


def test_it_generates_the_same_as_on_the_gpu(experts: Path, program: Program) -> None:
    large = (*OPTIONS, "virtual:1GiB", "--host-memory", "1GiB", "--experts")
    prompts = ("-p", "ab", "--json")
    answers = []
    for options in ((*large, "gpu"), (*large, "host"), SMALL):
        done = program("generate", experts, *options, *prompts)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout)["answers"])
    assert answers[0] == answers[1] == answers[2]


def test_what_cannot_be_combined_is_refused(
    experts: Path, tiny: Path, program: Program, tmp_path: Path
) -> None:
    device_map = tmp_path / "map.json"
    device_map.write_text('{"": "vgpu:0"}')
    host = (*OPTIONS, "virtual:64MiB", "--host-memory", "1GiB", "--experts", "host")
    for model, options, message in (
        (experts, (*host[:-1], "cpu"), "supported: auto, gpu, host"),
        (experts, (*OPTIONS, "virtual:64MiB", "--experts", "host"), "--host-memory 64GiB"),
        (experts, (*host, "--device-map", device_map), "a device map already decides"),
        (tiny, host, "has no experts that can be in host memory"),
    ):
        done = program("plan", model, *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in " ".join(done.stderr.split())

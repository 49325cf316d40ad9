"""Plans for training, from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import duoka
from duoka.cli.main import app
from duoka.cli.training_options import complete_arguments

from .conftest import GPUS, Program

SEQUENCE = ("--context", "96", "--dtype", "bf16")


@pytest.mark.slow
def test_a_plan_for_training_is_shown_and_kept(
    tiny: Path, program: Program, tmp_path: Path
) -> None:
    saved = tmp_path / "training.plan"
    said = ("--train", "full", "--micro-batches", "4", "--schedule", "1f1b", "--use-all")
    done = program("plan", tiny, *GPUS, *SEQUENCE, *said, "--save", saved)
    assert done.returncode == 0, done.stderr
    assert "full training · 1 x 96 tokens" in done.stdout
    assert "gradients" in done.stdout
    assert "optimizer" in done.stdout
    assert "KV cache" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    plan = duoka.Plan.load(saved)
    training = plan.workload.training
    assert training is not None
    assert (training.method, training.micro_batches, training.schedule) == ("full", 4, "1f1b")
    assert plan.workload.new_tokens == 0
    for device in plan.forecast.devices:
        parts = device.weight_bytes + device.activation_bytes + device.gradient_bytes
        assert parts + device.optimizer_bytes == device.allocated_bytes
    again = program("plan", "--plan", saved, "--replan")
    assert again.stdout == done.stdout

    refused = program("generate", "--plan", saved, "--prompt", "hello")
    assert refused.returncode == 2
    assert "the plan is for training" in refused.stderr


@pytest.mark.slow
def test_adapters(tiny: Path, program: Program) -> None:
    said = ("--train", "lora", "--lora-rank", "4", "--lora-target", "q_proj", "--optimizer", "sgd")
    done = program("plan", tiny, *GPUS, *SEQUENCE, *said, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["workload"]["training"]
    assert (told["lora_rank"], told["lora_targets"], told["optimizer"]) == (4, ["q_proj"], "sgd")


def test_the_words_of_train_are_completed() -> None:
    for given, expected in (
        ("tune m d --train full --checkpointing", "tune m d --train full --checkpointing"),
        ("plan m --train qlora", "plan m --train lora --quantize nf4"),
        ("check m --train=qlora --quantize int8", "check m --train=lora --quantize int8"),
        ("tune m d --train qlora", "tune m d --train qlora"),
        ("check m --train", "check m --train full"),
    ):
        assert complete_arguments(given.split()) == expected.split()


def test_a_toml_file_has_the_options_that_are_not_given(tmp_path: Path) -> None:
    lines = ('train = "qlora"', 'context = "4K"', "batch = 16", "lr = 2e-4", 'eval = "other.jsonl"')
    file = tmp_path / "tune.toml"
    file.write_text("\n".join([*lines, "packing = true", 'lora-target = ["q_proj", "v_proj"]']))
    program: Any = get_command(app)
    with program.commands["tune"].make_context(
        "tune", ["--config", str(file), "--batch", "4"]
    ) as at:
        read = {name: value for name, value in at.params.items() if value}
    assert read == {
        "config": file,
        "method": "qlora",
        "seq_length": "4K",
        "batch": 4,
        "lr": 2e-4,
        "eval_data": ["other.jsonl"],
        "packing": True,
        "lora_target": ["q_proj", "v_proj"],
    }

"""Plans for training, from the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tuning
from typer.main import get_command

import duoka
from duoka import TuneSettings
from duoka.cli.main import app, run
from duoka.cli.options import PlanOptions
from duoka.cli.training_options import TrainingOptions, complete_arguments
from duoka.tuner.prepare import prepare, read_data

from .conftest import GPUS, Program

SEQUENCE = ("--context", "96", "--dtype", "bf16")


@pytest.mark.slow
def test_a_plan_for_training_is_shown_and_kept(
    tiny: Path, program: Program, tmp_path: Path
) -> None:
    saved = tmp_path / "training.plan"
    said = ("--train", "full", "--batch", "4", "--use-all")
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


@pytest.mark.slow
def test_plan_and_tune_plan_the_same(tiny: Path, tmp_path: Path) -> None:
    """The same options and data, in the same words: a saved plan is one that the run accepts."""
    data = tmp_path / "chats.jsonl"
    tuning.write_chats(data)
    said = ("--train", "qlora", "--lora-rank", "4", "--batch", "4", "--micro-batch", "2")
    said += ("--packing", "--context", "64", "--checkpointing", "--gpus", GPUS[1])
    saved = tmp_path / "training.plan"
    assert run(["plan", str(tiny), "--data", str(data), *said, "--save", str(saved)]) == 0
    plan = duoka.Plan.load(saved)
    training = TrainingOptions(
        method="qlora", lora_rank=4, micro_batch=2, packing=True, checkpointing=True
    )
    assert plan.workload.training == training.read(PlanOptions(batch=4))[0]
    settings = TuneSettings(
        method="qlora", lora_rank=4, batch=4, micro_batch=2, packing=True, checkpointing=True,
        seq_length=64,
    )  # fmt: skip
    (tuned,) = prepare(
        duoka.Checkpoint.open(tiny), [str(data)], GPUS[1], settings, replicas=1
    ).plans
    assert tuned.workload.training == plan.workload.training
    assert replace(tuned.workload, prefill_chunk_tokens="auto") == replace(
        plan.workload, prefill_chunk_tokens="auto"
    )


def test_a_pair_is_two_sequences() -> None:
    training, options = TrainingOptions(method="lora", dpo=True, micro_batch=2).read(
        PlanOptions(batch=6)
    )
    assert training is not None
    assert (training.dpo, training.micro_batches, options.batch) == (True, 3, 4)
    assert training == TuneSettings(dpo=True, batch=6, micro_batch=2)._training(())


@pytest.mark.slow
def test_a_plan_has_the_length_of_the_data(tiny: Path, tmp_path: Path, capsys: Any) -> None:
    data = tmp_path / "chats.jsonl"
    tuning.write_chats(data)
    assert run(["plan", str(tiny), *GPUS, "--train", "lora", "--data", str(data), "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)["workload"]
    checkpoint = duoka.Checkpoint.open(tiny)
    settings, _ = read_data(checkpoint, [str(data)], TuneSettings())
    assert planned["prompt_tokens"] == settings.seq_length < 512
    assert (planned["batch"], planned["training"]["micro_batches"]) == (1, 8)


def test_the_words_of_train_are_completed() -> None:
    for given, expected in (
        ("tune m d --train full --checkpointing", "tune m d --train full --checkpointing"),
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

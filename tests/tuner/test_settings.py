"""What a person says of a run, and the workload that it is for the planner."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainers import make_layout

from duoka import Checkpoint, TuneSettings, Workload
from duoka.errors import UsageError
from duoka.forecast.workload import Training
from duoka.tuner.run import RunDirectory

PLAIN = Training(master_weights=True, micro_batches=8, schedule="1f1b", rows="unpadded")


@pytest.fixture
def checkpoint(llama: Path) -> Checkpoint:
    return Checkpoint.open(llama)


@pytest.mark.parametrize(
    ("options", "training", "workload"),
    [
        ({}, {}, {}),
        ({"method": "full"}, {"method": "full"}, {}),
        ({"method": "qlora"}, {}, {"quantize": "nf4"}),
        ({"method": "qlora", "quantize": "nf4"}, {}, {"quantize": "nf4"}),
        ({"quantize": "8bit", "dtype": "fp16"}, {}, {"quantize": "int8", "dtype": "float16"}),
        ({"seq_length": 64}, {}, {"prompt_tokens": 64}),
        ({"batch": 12, "micro_batch": 4}, {"micro_batches": 3}, {"batch": 4}),
        ({"packing": True}, {"rows": "packed"}, {}),
        (
            {"dpo": True, "batch": 6, "micro_batch": 3},
            {"dpo": True, "micro_batches": 2},
            {"batch": 6},
        ),
        ({"checkpointing": True}, {"gradient_checkpointing": True}, {}),
        (
            {"lora_rank": 4, "lora_alpha": 2, "lora_dropout": 0.1, "lora_target": ["q_proj"]},
            {"lora_rank": 4, "lora_alpha": 2, "lora_dropout": 0.1, "lora_targets": ("q_proj",)},
            {},
        ),
        ({"optimizer": "adafactor"}, {"optimizer": "adafactor"}, {}),
        ({"schedule": "gpipe"}, {"schedule": "gpipe"}, {}),
    ],
)
def test_they_are_a_workload(
    checkpoint: Checkpoint, options: Any, training: Any, workload: Any
) -> None:
    """The sequence is as long as the model's limit, which is below the default here."""
    expected = {"prompt_tokens": 128, "new_tokens": 0, "prefill_chunk_tokens": None, **workload}
    assert TuneSettings(**options).workload(checkpoint) == Workload(
        **expected, training=replace(PLAIN, **training)
    )


@pytest.mark.parametrize(("limit", "length"), [(64, 64), (4096, 2048), (None, 2048)])
def test_sequences_have_2048_tokens_by_default(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, limit: int | None, length: int
) -> None:
    monkeypatch.setattr(Checkpoint, "max_context_tokens", limit)
    assert TuneSettings().workload(checkpoint).prompt_tokens == length


def test_sequences_are_within_the_models_limit(checkpoint: Checkpoint) -> None:
    with pytest.raises(UsageError, match="of 129 tokens is beyond the model's 128") as refused:
        TuneSettings(seq_length=129).workload(checkpoint)
    assert refused.value.hint == "--context 128 at most"


@pytest.mark.parametrize(
    ("options", "rate"),
    [
        ({}, 1e-4),
        ({"method": "qlora"}, 1e-4),
        ({"method": "full"}, 1e-5),
        ({"lr": 3}, 3),
        ({"dpo": True}, 5e-6),
    ],
)
def test_the_learning_rate_is_the_methods(options: Any, rate: float) -> None:
    settings = TuneSettings(**options)
    assert settings.learning_rate == rate
    # Three steps of a hundred lead up to it.
    assert [settings.rate_at(step, 100) / rate for step in range(3)] == pytest.approx(
        [1 / 3, 2 / 3, 1]
    )


@pytest.mark.parametrize(
    ("warmup", "num_steps", "steps"), [(None, 10, 0), (None, 1000, 30), (0, 100, 0), (7, 5, 5)]
)
def test_the_warm_up_is_a_share_of_all_steps(
    warmup: int | None, num_steps: int, steps: int
) -> None:
    assert TuneSettings(warmup=warmup).warmup_steps(num_steps) == steps


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bf16", "quantize": "4bit"},
        {"batch": np.int64(4), "lora_rank": np.int32(2), "steps": np.int64(3)},
        {"eval_data": [Path("a.jsonl")], "eval_prompts": [Path("b")], "lora_target": ["q_proj"]},
        {"columns": {"prompt": "q", "response": "a"}, "max_samples": 3, "long": "refuse"},
    ],
)
def test_they_are_written_and_read(tmp_path: Path, llama: Path, options: Any) -> None:
    """Whatever a program says them by, the processes of the run read the same ones."""
    settings = TuneSettings(**options)
    plans = make_layout(llama, TuneSettings()).plans
    RunDirectory(tmp_path).write(settings, plans, trust_remote_code=False)
    assert RunDirectory(tmp_path).read().settings == settings
    plain = {**asdict(TuneSettings()), **options}
    content = json.loads((tmp_path / "run.json").read_text())["settings"]
    changed = {name for name, value in content.items() if value != plain[name]}
    assert changed <= {"dtype", "quantize", "eval_data", "eval_prompts", "lora_target", "report_to"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"seq_length": 0}, "seq_length is 0; it must be at least 1"),
        ({"lora_alpha": 0}, "lora_alpha is 0; it must be at least 1"),
        ({"warmup": -1}, "warmup is -1; it must be at least 0"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"batch": "8"}, "batch is '8'; it must be an integer"),
        ({"keep": True}, "keep is True; it must be an integer"),
        ({"batch": None}, "batch is None; it must be an integer"),
        *(
            ({"lr": rate}, f"lr is {rate}; it must be a positive number")
            for rate in (-1e-4, inf, nan, "1e-4", True)
        ),
        ({"max_grad_norm": -1}, "max_grad_norm is -1; it must be a non-negative number"),
        ({"lr": 0}, "lr is 0; it must be a positive number"),
        ({"weight_decay": None}, "weight_decay is None; it must be a non-negative number"),
        (
            {"optimizer": "sgd", "weight_decay": 0.1},
            "weight_decay is 0.1, and duoka's SGD doesn't support",
        ),
        ({"method": "dora"}, "method 'dora' is unknown"),
        ({"train_on": "first"}, "train_on 'first' is unknown"),
        ({"lr_schedule": "step"}, "lr_schedule 'step' is unknown"),
        ({"optimizer": "adam"}, "optimizer 'adam' is unknown"),
        ({"schedule": "zb"}, "schedule 'zb' is unknown"),
        ({"dtype": "fp8"}, "dtype 'fp8' is unknown"),
        ({"quantize": "int3"}, "quantize 'int3' is unknown"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0; it must be at least 0 and below 1"),
        ({"eval_data": "a.jsonl"}, "eval_data is 'a.jsonl'; it must be a tuple of strings"),
        ({"lora_target": "q_proj"}, "lora_target is 'q_proj'; it must be a tuple of strings"),
        ({"long": "cut"}, "long 'cut' is unknown"),
        ({"dpo": True, "method": "full"}, "DPO needs adapters"),
        ({"dpo": True, "packing": True}, "and no packing"),
        ({"dpo": True, "dpo_beta": 0}, "dpo_beta is 0; it must be a positive number"),
        ({"columns": {"chosen": "a"}}, "columns names answers of pairs, which are for DPO"),
        ({"max_samples": 0}, "max_samples is 0; it must be at least 1"),
        ({"columns": {"question": "q"}}, "columns 'question' is unknown"),
        ({"columns": {"prompt": "q"}}, "columns names prompt; it must name a prompt"),
        ({"columns": {"response": "q", "system": "s"}}, "columns names response, system; it must"),
        ({"columns": {"text": "t", "messages": "m"}}, "columns names text, messages; it must"),
        ({"batch": 6, "micro_batch": 4}, "a batch of 6 is not divisible into micro-batches of 4"),
    ],
)
def test_what_makes_no_sense_is_refused(options: Any, problem: str) -> None:
    with pytest.raises(UsageError) as refused:
        TuneSettings(**options)
    assert problem in str(refused.value)
    assert refused.value.hint


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"method": "full", "quantize": "nf4"}, "quantized weights are frozen"),
        ({"quantize": "int4"}, "whose kernels"),
    ],
)
def test_what_no_workload_can_be_is_refused(
    checkpoint: Checkpoint, options: Any, problem: str
) -> None:
    with pytest.raises(UsageError, match=problem):
        TuneSettings(**options).workload(checkpoint)

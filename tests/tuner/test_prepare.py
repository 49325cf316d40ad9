"""Plans that are given to a run: taken with the scale of its adapters, or refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainers import make_layout
from tuning import write_chats, write_model

from duoka import Checkpoint, TuneSettings
from duoka.errors import UsageError
from duoka.planner.plan import Plan
from duoka.tuner.prepare import prepare

SETTINGS: dict[str, Any] = {"seq_length": 32, "batch": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("shallow", tmp_path_factory.mktemp("model"))


@pytest.fixture
def plan(model: Path) -> Plan:
    return make_layout(model, TuneSettings(**SETTINGS)).plans[0]


def prepared(model: Path, plan: Plan, tmp_path: Path, **more: Any) -> Plan:
    data = write_chats(tmp_path / "chats.jsonl", 4)
    settings = TuneSettings(**{**SETTINGS, **more})
    return prepare(Checkpoint.open(model), [str(data)], "all", settings, plan=plan).plans[0]


def test_the_scale_of_adapters_is_the_runs(model: Path, plan: Plan, tmp_path: Path) -> None:
    assert prepared(model, plan, tmp_path) == plan
    scaled = prepared(model, plan, tmp_path, lora_alpha=3, rslora=True)
    assert plan.workload.training is not None
    training = replace(plan.workload.training, lora_alpha=3, rslora=True)
    assert scaled == replace(plan, workload=replace(plan.workload, training=training))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"method": "full"}, "the plan is for --train lora, not full"),
        ({"batch": 8}, "the plan is for --batch 4, not 8"),
        ({"seq_length": 64}, "the plan is for --context 32, not 64"),
        ({"lora_rank": 4}, "the plan is for --lora-rank 8, not 4"),
        ({"lora_dropout": 0.1}, "the plan is for --lora-dropout 0.0, not 0.1"),
        ({"lora_target": ("q_proj",)}, "the plan is for --lora-target"),
        ({"checkpointing": True}, "the plan is for --checkpointing False, not True"),
        ({"quantize": "int8"}, "the plan is for --quantize none, not int8"),
        ({"method": "qlora"}, "the plan is for --quantize none, not nf4"),
        ({"dtype": "float16"}, "the plan is for --dtype float32, not float16"),
        ({"dpo": True}, "the plan has odd micro-batches, not pairs"),
    ],
)
def test_a_plan_of_another_run_is_refused(
    model: Path, plan: Plan, tmp_path: Path, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        prepared(model, plan, tmp_path, **more)

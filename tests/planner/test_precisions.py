"""Weights in every precision side by side: each is what it would be if it was asked for alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import rehearsing
import tiny
from checkpoints import write_random
from tiny import MIB

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import UsageError
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Workload
from duoka.planner.modes import attempt
from duoka.planner.precisions import Precision, precisions
from duoka.planner.request import PlanProblem
from duoka.tools.demo.checkpoint import CONFIG

LOAD = Workload(prompt_tokens=100, new_tokens=20)
NAMES = ["float32", "bfloat16", "int8", "int4", "nf4"]
NAMES += ["training LoRA", "training LoRA on nf4", "training all"]
SIZES = {"float32": 16, "bfloat16": 8, "int8": 4, "int4": 2, "nf4": 3}
TRAINED = rehearsing.made_up([rehearsing.Layer(weight=8 * MIB, result=MIB, saved=MIB)] * 6)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(write_random(tmp_path_factory.mktemp("forms"), CONFIG, seed=1))


def profile_for(workload: Workload) -> Profile:
    if workload.training is not None:
        return replace(TRAINED, conditions=workload.conditions)
    form = workload.dtype if workload.quantize == "none" else workload.quantize
    if form == "nf4":
        raise UsageError("this model has no nf4")
    made = tiny.made_up([SIZES[form] * MIB] * 6, tiny.Costs(cache=512))
    return replace(made, conditions=workload.conditions)


def forms(checkpoint: Checkpoint, *budgets_mib: float) -> dict[str, Precision]:
    problem = PlanProblem(fleet=tiny.fleet(*budgets_mib), workload=LOAD)
    return {form.name: form for form in precisions(checkpoint, problem, profile_for)}


def test_each_form_is_planned_as_if_it_was_asked_for(checkpoint: Checkpoint) -> None:
    found = forms(checkpoint, 90, 60)
    assert list(found) == NAMES
    for name in ("float32", "bfloat16", "int8", "int4"):
        form = found[name]
        assert form.weight_bytes == 6 * SIZES[name] * MIB
        assert form.plan is not None
        assert (
            attempt(
                profile_for(form.plan.workload),
                PlanProblem(fleet=tiny.fleet(90, 60), workload=form.plan.workload),
            )
            is not None
        )
        assert form.to_dict()["fits"]
    used = [len(found[name].plan.devices) for name in ("float32", "int4")]  # type: ignore[union-attr]
    assert used == [2, 1]
    assert found["int4"].cache_tokens > found["int8"].cache_tokens > 0
    assert found["nf4"].trouble == "this model has no nf4"


def test_what_weights_alone_outweigh_is_not_traced(checkpoint: Checkpoint) -> None:
    found = forms(checkpoint, 100)
    assert found["training all"] == Precision(name="training all")
    assert found["training LoRA"].weight_bytes

"""What is tried where the quantization is left open, and in which order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from tiny import MIB

from duoka import Checkpoint, Workload
from duoka.errors import InfeasibleError, UsageError
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Training
from duoka.planner.constraints import Constraints
from duoka.planner.request import PlanProblem
from duoka.planner.resolve import answer_checkpoint, workload_for

WORK = Workload(prompt_tokens=700, new_tokens=40, quantize="auto", prefill_chunk_tokens=None)
SHARES = {"none": 1.0, "int8": 0.5, "int4": 0.25}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp("glm") / "config.json"
    path.write_text(json.dumps({**tiny.CONFIGS["glm"], "dtype": "bfloat16"}))
    return Checkpoint.open(path)


def profile_for(workload: Workload) -> Profile:
    """Six layers that become smaller, and an embedding and a head that don't."""
    layers = [round(40 * MIB * SHARES[workload.quantize])] * 6
    made = tiny.made_up([60 * MIB, *layers, 59 * MIB], tiny.Costs(cache=2048))
    blocks = made.blocks
    if workload.quantize != "none":
        blocks = tuple(replace(block, streams=False) for block in blocks)
    return replace(made, blocks=blocks, conditions=workload.conditions)


@pytest.mark.parametrize(
    ("budget", "chosen", "reason"),
    [
        (400, "none", None),
        (300, "int8", "Weights are quantized to int8: unquantized they don't fit."),
        (230, "int4", "Weights are quantized to int4: unquantized or in int8 they don't fit."),
    ],
)
@pytest.mark.parametrize("offload", [False, True])
def test_weights_are_quantized_before_any_are_offloaded(
    checkpoint: Checkpoint, budget: int, chosen: str, reason: str | None, offload: bool
) -> None:
    constraints = Constraints(offload=offload)
    asked = PlanProblem(fleet=tiny.fleet(budget), workload=WORK, constraints=constraints)
    plan = answer_checkpoint(checkpoint, asked, profile_for)
    assert plan.workload.quantize == chosen
    assert plan.offloaded == ()
    sentences = [each.text for each in plan.why]
    assert [each for each in sentences if "they don't fit" in each] == ([reason] if reason else [])
    assert plan.request.constraints.offload == offload


def test_weights_are_offloaded_where_four_bits_do_not_fit(checkpoint: Checkpoint) -> None:
    large = tiny.made_up([60 * MIB, *[40 * MIB] * 6, 59 * MIB], tiny.Costs(cache=2048))

    def find(workload: Workload) -> Profile:
        streams = workload.quantize == "none"
        blocks = tuple(replace(each, streams=streams and each.streams) for each in large.blocks)
        return replace(large, blocks=blocks, conditions=workload.conditions)

    asked = PlanProblem(fleet=tiny.fleet(300), workload=WORK)
    with pytest.raises(InfeasibleError):
        answer_checkpoint(checkpoint, asked, find)
    asked = replace(asked, constraints=Constraints(offload=True))
    plan = answer_checkpoint(checkpoint, asked, find)
    assert plan.workload.quantize == "none"
    assert plan.offloaded
    assert plan.why[0].text == (
        "Some weights are offloaded: unquantized or in int8 or in int4 they don't fit."
    )


def test_a_checkpoint_that_is_quantized_already_is_no_base_for_training(tmp_path: Path) -> None:
    config = {**tiny.CONFIGS["llama"], "dtype": "bfloat16"}
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint.open(tmp_path / "config.json")
    workload = Workload(prompt_tokens=9, new_tokens=0, training=Training())
    with pytest.raises(UsageError, match="is already quantized") as refused:
        workload_for(checkpoint, workload)
    assert "use the 16-bit checkpoint with --quantize nf4" in (refused.value.hint or "")


def test_pages_of_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in 8 bit: one scale for a latent and a rotary part would round the smaller away."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**tiny.CONFIGS["latent"], "dtype": "bfloat16"}))
    latent = Checkpoint.open(path)
    sizes = [
        workload_for(latent, replace(WORK, cache=cache)).page_tokens
        for cache in ("paged", "paged-int8", "dynamic")
    ]
    assert sizes == [32, 16, 16]
    monkeypatch.setattr("duoka.planner.resolve.caches_latents", lambda config: False)
    assert workload_for(latent, replace(WORK, cache="paged")).page_tokens == 16

"""The engine over pages of latents: answers of transformers' generate, in the forecast's bytes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import plain_generate
import pytest
import tuning

import duoka
from duoka import virtual
from duoka.engine import Engine, SamplingParams
from duoka.forecast.allocator import ROUND_BYTES
from duoka.runtime import devices

pytestmark = pytest.mark.usefixtures("every_step")

# Virtual GPUs have no graphs.
WORK = duoka.Workload(
    cache="paged", batch=3, prompt_tokens=100, new_tokens=28, dtype="float32",
    prefill_chunk_tokens=20, pages_for_batch=True, cuda_graphs=False,
)  # fmt: skip
LAYERS, LATENT = 2, 16 + 8


def prompts() -> list[list[int]]:
    """Prompts of which some share their first pages."""
    rng = random.Random(1)
    common = [rng.randrange(256) for _ in range(70)]
    own = [[rng.randrange(256) for _ in range(length)] for length in (1, 17, 90)]
    return [*own, common, [*common, 5, 6], [*common[:64], 9], [*common, 5, 7, 8]]


def squeezed(plan: duoka.Plan) -> duoka.Plan:
    """Return the plan on devices whose budgets are what is forecast to be reserved."""
    budgets = {stage.device: stage.reserved_bytes for stage in plan.forecast.devices}
    return plan.move_to(
        {
            device.name: replace(device, budget_bytes=budgets.get(device.name, device.budget_bytes))
            for device in plan.fleet.devices
        }
    )


@pytest.mark.parametrize(
    ("family", "number", "processes"),
    [
        ("latents", 1, False),
        ("dense latents", 2, False),
        pytest.param("latents", 2, True, marks=pytest.mark.process),
    ],
)
def test_answers_and_bytes(family: str, number: int, processes: bool, tmp_path: Path) -> None:
    model = tuning.write_model(family, tmp_path / "model")
    plan = squeezed(duoka.plan(model, f"virtual:{number}x256MiB", WORK, use_all=True))
    assert plan.workload.page_tokens == 32
    page_bytes = 32 * LATENT * 4
    cached = sum(stage.kv_cache_bytes for stage in plan.forecast.devices)
    assert cached == LAYERS * (plan.workload.pages + 1) * page_bytes
    texts = prompts()
    expected = plain_generate.answers(plan, texts, max_new_tokens=12)
    virtual.set_gpus([None])
    with Engine(plan, processes=processes) as engine:
        found = engine.generate(texts, SamplingParams(max_new_tokens=12))
        peaks: Any = {peak.device: peak for peak in engine.peaks()}
    assert [completion.text for completion in found] == [answer.text for answer in expected]
    for stage in plan.forecast.devices:
        peak = peaks[stage.device] if processes else devices.peak_bytes(stage.device)
        assert peak.reserved_bytes == stage.reserved_bytes
        assert abs(peak.allocated_bytes - stage.allocated_bytes) <= 16 * ROUND_BYTES

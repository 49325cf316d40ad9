"""The engine on virtual GPUs that have the forecast's bytes and not one more."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tuning

import duoka
from duoka import virtual
from duoka.checker.prove import prove
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.engine import Engine, SamplingParams
from duoka.errors import ProofError, UsageError
from duoka.forecast.allocator import ROUND_BYTES
from duoka.models.from_checkpoint import build_model
from duoka.runtime import devices
from duoka.runtime.call.paged_model import PagedModel

pytestmark = pytest.mark.usefixtures("every_step")

WORK = duoka.Workload(
    cache="paged", batch=3, prompt_tokens=100, new_tokens=28, dtype="float32",
    prefill_chunk_tokens=20, pages=20,
)  # fmt: skip

SHORT = SamplingParams(max_new_tokens=6)


def squeezed(plan: duoka.Plan) -> duoka.Plan:
    """The plan on devices whose budgets are what is forecast to be reserved."""
    budgets = {stage.device: stage.reserved_bytes for stage in plan.forecast.devices}
    return plan.move_to(
        {
            device.name: replace(device, budget_bytes=budgets.get(device.name, device.budget_bytes))
            for device in plan.fleet.devices
        }
    )


@pytest.fixture(
    scope="module",
    params=[("shallow", 1, "paged"), ("tied", 2, "paged"), ("shallow", 1, "paged-int8")],
    ids=lambda param: "-".join(map(str, param)),
)
def plan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> duoka.Plan:
    family, number, cache = request.param
    model = tuning.write_model(family, tmp_path_factory.mktemp("model") / family)
    work = replace(WORK, cache=cache)
    return squeezed(duoka.plan(model, f"virtual:{number}x64MiB", work, use_all=True))


@pytest.fixture
def engine(plan: duoka.Plan, every_step: None) -> Iterator[Engine]:
    gc.collect()
    virtual.set_gpus([None])  # GPUs of its own, with nothing of an engine before
    with Engine(plan, processes=False) as engine:
        yield engine


def random_requests(number: int) -> Iterator[tuple[int, list[int]]]:
    rng = random.Random(3)
    for at in range(number):
        yield at, [rng.randrange(256) for _ in range(rng.choice([1, 5, 17, 60, 100]))]


def test_what_was_forecast_is_what_it_takes(plan: duoka.Plan, engine: Engine) -> None:
    rng = random.Random(4)
    for at, prompt in random_requests(12):
        params = SamplingParams(
            max_new_tokens=rng.choice([1, 4, 9]),
            temperature=rng.choice([0.0, 0.9]),
            logprobs=rng.choice([None, 5]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            seed=at,
        )
        stream = engine.submit(prompt, params)
        if rng.random() < 0.1:
            stream.cancel()
        if rng.random() < 0.3:
            stream.result()
    answers = [outcome for _, outcome in engine.as_completed(random_requests(5), SHORT)]
    assert not [answer for answer in answers if isinstance(answer, Exception)]
    assert engine.load().free_pages == engine.capacity.pages == WORK.pages
    for stage, gpu in zip(plan.forecast.devices, virtual.active_world().gpus, strict=True):
        peaks: Any = devices.peak_bytes(stage.device)
        assert not gpu.allocator.is_pressed
        assert peaks.reserved_bytes == stage.reserved_bytes == stage.budget_bytes
        assert 0.97 * stage.allocated_bytes <= peaks.allocated_bytes <= stage.allocated_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "number", "options"),
    [
        ("tied", 2, {}),
        ("llama", 3, {}),
        ("llama", 2, {"cache": "paged-int8"}),
        # FlashAttention reads pages in place; virtual GPUs have no graphs.
        ("llama", 2, {"dtype": "bfloat16", "page_tokens": 256, "cuda_graphs": False}),
    ],
)
def test_processes_take_what_was_forecast(
    family: str, number: int, options: dict[str, Any], tmp_path: Path
) -> None:
    model = tuning.write_model(family, tmp_path / family)
    work = replace(WORK, **options)
    plan = squeezed(duoka.plan(model, f"virtual:{number}x64MiB", work, use_all=True))
    with Engine(plan, processes=True) as engine:
        answers = [outcome for _, outcome in engine.as_completed(random_requests(12), SHORT)]
    assert not [answer for answer in answers if isinstance(answer, Exception)]
    for peak, stage in zip(engine.peaks(), plan.forecast.devices, strict=True):
        assert (peak.device, peak.reserved_bytes) == (stage.device, stage.reserved_bytes)
        # The forecast holds for one process, too: there the rows of logits are a copy of their own.
        assert 0 <= stage.allocated_bytes - peak.allocated_bytes <= ROUND_BYTES


def test_the_largest_steps_alone_are_tried_for_work_that_ends_soon(
    plan: duoka.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    try_out = PagedModel.try_out
    monkeypatch.setattr(
        PagedModel, "try_out", lambda self, size: (tried.append(size), try_out(self, size))
    )
    with Engine(plan, processes=False, warm_up="largest") as engine:
        largest = engine.capacity.largest_steps()
        assert tried == [*largest, *largest]  # the proof's, and the engine's
        assert {size.tokens for size in largest} == {engine.capacity.steps()[0].tokens}
        assert len(largest) < len(engine.capacity.steps()) / 3
        answers = [outcome for _, outcome in engine.as_completed(random_requests(12), SHORT)]
    assert not [answer for answer in answers if isinstance(answer, Exception)]
    for stage in plan.forecast.devices:
        peaks: Any = devices.peak_bytes(stage.device)
        assert peaks.reserved_bytes <= stage.reserved_bytes
    with pytest.raises(UsageError, match="warm_up 'none' is unknown"):
        Engine(plan, warm_up="none")  # type: ignore[arg-type]


def test_the_proof_runs_the_worst_step(plan: duoka.Plan) -> None:
    model = build_model(Checkpoint.open(plan.source), plan.workload)
    for stage, peak in zip(plan.forecast.devices, prove(plan, model), strict=True):
        assert peak.allocated_bytes == stage.allocated_bytes
        assert peak.reserved_bytes <= stage.reserved_bytes
    lacking = [
        replace(device, budget_bytes=device.budget_bytes - 2**20) for device in plan.fleet.devices
    ]
    with pytest.raises(ProofError, match="lacks memory"):
        prove(plan.move_to({device.name: device for device in lacking}), model)

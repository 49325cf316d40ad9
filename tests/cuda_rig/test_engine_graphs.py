"""Decode steps as CUDA graphs: counts, answers, and what happens where CUDA refuses a graph."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning
from cuda_rig.values import values
from transformers.models.llama.modeling_llama import LlamaMLP

import duoka
from duoka.engine import Engine, SamplingParams, executor
from duoka.engine.executor import InlineExecutor, outcomes_of
from duoka.engine.sampler import SamplingRow
from duoka.errors import GpuLostError
from duoka.forecast.serving import Capacity
from duoka.report.measured import Fallback
from duoka.runtime.call import paged_model
from duoka.runtime.call.chunk import Chunk

WORK = duoka.Workload(
    cache="paged", batch=6, prompt_tokens=100, new_tokens=28, dtype="bfloat16",
    prefill_chunk_tokens=20, pages=20, page_tokens=256,
)  # fmt: skip
PROMPTS = [[*range(1, 1 + length)] for length in (1, 5, 17, 60, 100)]
TEN = SamplingParams(max_new_tokens=10, min_new_tokens=10)
LOG = Path(tempfile.gettempdir()) / f"duoka-engine-graphs-{os.getpid()}"
pytestmark = pytest.mark.cuda_rig(gpus="1GiB,1GiB", copy_limit="1GiB", log=LOG)


def lines_of(run: Callable[[], object]) -> list[str]:
    """Return the lines that the rig logs meanwhile."""
    done = LOG.stat().st_size
    run()
    return LOG.read_text()[done:].splitlines()


@pytest.mark.parametrize(
    ("family", "batch"),
    [("llama", 1), ("llama", 5), ("llama", 6), ("dense latents", 1), ("dense latents", 5)],
)
def test_a_decode_step_is_one_launch(family: str, batch: int, tmp_path: Path) -> None:
    """Sampling adds two launches. A copy goes to the GPU, one from it, one is for the next step."""
    work = replace(WORK, page_tokens=32, pages=40) if family == "dense latents" else WORK
    plan = duoka.plan(tuning.write_model(family, tmp_path / "model"), "1GiB", work)
    executor = InlineExecutor(duoka.load(plan), Capacity.of(work), work)
    row = SamplingRow(params=SamplingParams(), seed=0, place=0)
    with values(), torch.no_grad():
        executor.start()
        for place in range(20, 30):
            chunks = [Chunk(at, [7], place + at, [at, at + 10], row) for at in range(batch)]
            lines = lines_of(lambda c=chunks: outcomes_of(c, executor.sample(c)))  # type: ignore[misc]
            launches = [line for line in lines if line.startswith("launch")]
            assert sum("graph" in line for line in launches) == 1
            assert len(launches) <= 3
            assert sum(line.startswith("copy") for line in lines) == 3
            assert sum(line.startswith("wait") for line in lines) == 1
    executor.close()


fallbacks: list[Fallback] = []
"""Those of the engine that has answered last."""


def answer(plan: duoka.Plan, **options: Any) -> list[list[int]]:
    with Engine(plan, **options) as engine:
        with engine._lock:  # so that all are in the first step
            streams = [engine.submit(prompt, TEN) for prompt in PROMPTS]
        answers = [stream.result() for stream in streams]
        fallbacks[:] = engine.fallbacks()
    return [[choice.token for choice in each.tokens] for each in answers]


@pytest.mark.usefixtures("engine_computes")
@pytest.mark.parametrize("family", ["llama", "tied", "dense latents"])
def test_answers_are_those_without_graphs(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tuning.write_model(family, tmp_path / "model")
    work = replace(WORK, page_tokens=32, pages=40) if family == "dense latents" else WORK
    with values(most=None):
        plain = answer(duoka.plan(model, "1GiB", replace(work, cuda_graphs=False)))
        graphs: list[list[int]] = []
        plan = duoka.plan(model, "1GiB", work)
        lines = lines_of(lambda: graphs.extend(answer(plan)))
    assert torch.cuda.max_memory_reserved() == plan.forecast.devices[0].reserved_bytes
    assert graphs == plain
    assert not fallbacks
    assert len({token for tokens in plain for token in tokens}) > 3  # they say something
    assert sum("graph of" in line for line in lines) >= 5
    assert not caplog.records


@pytest.mark.usefixtures("engine_computes")
def test_answers_are_those_of_steps_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, as the steps have other companies."""
    model = tuning.write_model("llama", tmp_path / "model")
    plan = duoka.plan(model, "1GiB", replace(WORK, dtype="float32", page_tokens=16, pages=40))
    with values(most=None):
        asynchronous = answer(plan)
        monkeypatch.setattr(executor, "_is_asynchronous", lambda model: False)
        assert answer(plan) == asynchronous


@pytest.mark.usefixtures("engine_computes")
@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_a_step_is_launched_before_the_host_waits_for_the_last_one(
    is_asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "_is_asynchronous", lambda model: is_asynchronous)
    plan = duoka.plan(tuning.write_model("llama", tmp_path / "model"), "1GiB", WORK)
    with Engine(plan) as engine:
        engine.generate(PROMPTS, TEN)
        lines = lines_of(lambda: engine.generate([[1, 2, 3]], TEN))
    # The prompt isn't computed by a graph, so that one wait more than graphs comes in the end.
    numbers = [1 if "graph of" in line else -line.startswith("wait") for line in lines]
    assert (max(accumulate(numbers)), sum(numbers)) == (int(is_asynchronous), -1)


@pytest.mark.usefixtures("engine_computes")
@pytest.mark.parametrize("fault", ["refused", "different"])
def test_faulty_graphs_are_not_used(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the reason, and answers are those without graphs."""
    monkeypatch.delenv("DUOKA_ATTENTION")
    model = tuning.write_model("llama", tmp_path / "model")
    with values(most=None):
        plain = answer(duoka.plan(model, "1GiB", replace(WORK, cuda_graphs=False)))
        if fault == "refused":
            forward = LlamaMLP.forward

            def read_values(self: Any, states: torch.Tensor) -> torch.Tensor:
                assert float(states.sum()) < 1e9  # the host waits for the GPU
                return forward(self, states)

            monkeypatch.setattr(LlamaMLP, "forward", read_values)
        else:
            monkeypatch.setattr(paged_model, "fill", lambda table, numbers: table.zero_())
        graphs: list[list[int]] = []
        lines = lines_of(
            lambda: graphs.extend(answer(duoka.plan(model, "1GiB", WORK), warm_up="largest"))
        )
    assert graphs == plain
    (message,) = (record.getMessage() for record in caplog.records)
    expected = "results differ by" if fault == "different" else "captur"
    assert message.startswith("cuda:0: decode steps run without CUDA graphs: ")
    assert expected in message
    assert fallbacks == [("cuda:0", "graphs", message.partition("graphs: ")[2])]
    assert sum("graph of" in line for line in lines) <= 1  # that of the comparison
    cached = torch.empty(100 * 2**20, device="cuda:0")
    reserved_bytes = torch.cuda.memory_reserved()
    del cached
    torch.cuda.empty_cache()  # the allocator doesn't record any longer
    assert torch.cuda.memory_reserved() <= reserved_bytes - 400 * 2**20


@pytest.mark.cuda_rig(gpus="1GiB", capability="9.0", processors="132", log=LOG)
@pytest.mark.parametrize("segments", ["fixed", "expandable"])
def test_the_pool_is_forecast_with_a_larger_workspace(
    segments: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Hopper's workspace of 32 MiB has a segment of its own, unless segments grow by 20 MiB."""
    if segments == "expandable":
        request.getfixturevalue("expandable_segments")
    plan = duoka.plan(tuning.write_model("llama", tmp_path / "model"), "H100-SXM", WORK)
    with Engine(plan):
        pass
    assert torch.cuda.max_memory_reserved() == plan.forecast.devices[0].reserved_bytes


@pytest.mark.parametrize("family", ["llama", "dense latents"])
def test_each_stage_replays_one_graph_per_step(family: str, tmp_path: Path) -> None:
    model = tuning.write_model(family, tmp_path / "model")
    work = replace(WORK, page_tokens=32, pages=40) if family == "dense latents" else WORK
    plan = duoka.plan(model, "1GiB,1GiB", work, use_all=True)
    with Engine(plan, processes=True) as engine:
        engine.generate([[1, 2, 3]], TEN)
        lines = lines_of(lambda: engine.generate([[3, 2, 1]], TEN))
    assert sum("graph of" in line for line in lines) == 9 * len(plan.devices)
    for peak, stage in zip(engine.peaks(), plan.forecast.devices, strict=True):
        assert (peak.device, peak.reserved_bytes) == (stage.device, stage.reserved_bytes)


@pytest.mark.parametrize(
    "lost",
    [pytest.param(n, marks=pytest.mark.cuda_rig(lost=f"0@{n}")) for n in (150, 250, 350, 450, 550)],
)
def test_a_gpu_that_is_lost_is_told_in_any_phase(lost: int, tmp_path: Path) -> None:
    """While it warms up, while graphs are recorded, and while they are replayed."""
    plan = duoka.plan(tuning.write_model("llama", tmp_path / "model"), "1GiB", WORK)
    with pytest.raises(GpuLostError, match="CUDA error: "):
        list(map(partial(answer, warm_up="first"), repeat(plan)))

"""Adapters that requests choose over CUDA: graphs, launches and memory."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning
from adapters import sizes_of, write_adapter
from cuda_rig.values import values

import duoka
from duoka.api.load import OpenedModel, load_proved
from duoka.engine import Engine, SamplingParams
from duoka.engine.executor import InlineExecutor, outcomes_of
from duoka.engine.sampler import SamplingRow
from duoka.forecast.allocator import ROUND_BYTES
from duoka.forecast.serving import Capacity
from duoka.runtime.call.chunk import Chunk

WORK = duoka.Workload(
    cache="paged", batch=6, prompt_tokens=100, new_tokens=28, dtype="bfloat16",
    prefill_chunk_tokens=20, pages=20, page_tokens=256,
)  # fmt: skip
PROMPTS = [[*range(1, 1 + length)] for length in (1, 5, 17, 60, 100)]
TEN = SamplingParams(max_new_tokens=10, min_new_tokens=10)
LOG = Path(tempfile.gettempdir()) / f"duoka-adapters-{os.getpid()}"
pytestmark = pytest.mark.cuda_rig(gpus="1GiB,1GiB", copy_limit="1GiB", log=LOG)
NAMES = (None, "first", "second")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tuning.write_model("llama", tmp_path / "model")


@pytest.fixture
def work(model: Path, tmp_path: Path) -> duoka.Workload:
    """Two adapters, of all linear modules of layers and of two alone."""
    wide = write_adapter(tmp_path / "first", sizes_of(model, "proj"))
    narrow = write_adapter(tmp_path / "second", sizes_of(model, "q_proj", "v_proj"), rank=8)
    return replace(WORK, adapters=(("first", str(wide)), ("second", str(narrow))))


def answer(plan: duoka.Plan) -> list[list[int]]:
    with Engine(plan) as engine:
        with engine._lock:  # so that all are in the first step
            streams = [
                engine.submit(prompt, TEN, adapter=NAMES[at % 3])
                for at, prompt in enumerate(PROMPTS)
            ]
        answers = [stream.result() for stream in streams]
        assert not engine.fallbacks()
    return [[choice.token for choice in each.tokens] for each in answers]


@pytest.mark.usefixtures("engine_computes")
def test_answers_are_those_without_graphs(model: Path, work: duoka.Workload) -> None:
    with values(most=None):
        plain = answer(duoka.plan(model, "1GiB", replace(work, cuda_graphs=False)))
        plan = duoka.plan(model, "1GiB", work)
        done = LOG.stat().st_size
        assert answer(plan) == plain
        assert LOG.read_text()[done:].count("graph of") >= 5
    assert torch.cuda.max_memory_reserved() == plan.forecast.devices[0].reserved_bytes
    assert len({tuple(tokens) for tokens in plain}) == len(PROMPTS)


@pytest.mark.usefixtures("engine_computes_small")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_takes_what_is_forecast(model: Path, work: duoka.Workload, dtype: Any) -> None:
    if dtype == "float32":
        work = replace(work, dtype=dtype, page_tokens=16, pages=40)
    plan = duoka.plan(model, "1GiB", work)
    answer(plan)
    (stage,) = plan.forecast.devices
    assert torch.cuda.max_memory_reserved(0) == stage.reserved_bytes
    allocated = torch.cuda.max_memory_allocated(0)
    assert 0.97 * stage.allocated_bytes <= allocated <= stage.allocated_bytes + ROUND_BYTES


@pytest.mark.usefixtures("engine_computes_small")
def test_processes_take_what_is_forecast(model: Path, work: duoka.Workload) -> None:
    plan = duoka.plan(model, "1GiB,1GiB", work, use_all=True)
    with Engine(plan, processes=True) as engine:
        streams = [engine.submit(PROMPTS[3], TEN, adapter=name) for name in NAMES]
        assert all(stream.result().tokens for stream in streams)
    for peak, stage in zip(engine.peaks(), plan.forecast.devices, strict=True):
        assert (peak.device, peak.reserved_bytes) == (stage.device, stage.reserved_bytes)


def launches_of(plan: duoka.Plan, adapters: list[int]) -> list[str]:
    """The lines of the rig's log for a decode step."""
    model = load_proved(plan, OpenedModel.open(plan), outputs_stay=True)
    executor = InlineExecutor(model, Capacity.of(plan.workload), plan.workload, plan=plan)
    row = SamplingRow(params=SamplingParams(), seed=0, place=0)
    with values(), torch.no_grad():
        executor.start()
        for place in range(20, 26):  # the first steps get pinned memory from the driver
            done = LOG.stat().st_size
            chunks = [
                Chunk(at, [7], place, [at], row, adapter=number)
                for at, number in enumerate(adapters)
            ]
            outcomes_of(chunks, executor.sample(chunks))
            lines = LOG.read_text()[done:].splitlines()
    executor.close()
    return lines


@pytest.mark.usefixtures("engine_computes")
def test_a_decode_step_is_one_launch(model: Path, work: duoka.Workload) -> None:
    lines = launches_of(duoka.plan(model, "1GiB", work), [0, 1, 2, 1])
    launches = [line for line in lines if line.startswith("launch")]
    assert sum("graph" in line for line in launches) == 1
    assert len(launches) <= 3
    assert sum(line.startswith("copy") for line in lines) == 3
    assert sum(line.startswith("wait") for line in lines) == 1


@pytest.mark.usefixtures("engine_computes")
def test_launches_without_graphs(model: Path, work: duoka.Workload) -> None:
    """Three more for each of seven modules of four layers, and one for each layer.

    Copies and waits are the same, whatever is chosen.
    """
    work = replace(work, cuda_graphs=False)
    counts = []
    for workload, chosen in (
        (replace(work, adapters=()), [0, 0, 0]),
        (work, [0, 0, 0]),
        (work, [0, 1, 2]),
    ):
        lines = launches_of(duoka.plan(model, "1GiB", workload), chosen)
        words = [line.split()[0] for line in lines]
        counts.append([words.count(word) for word in ("launch", "copy", "wait")])
    assert counts[1] == counts[2]
    assert counts[1][1:] == counts[0][1:]
    assert 0 < counts[1][0] - counts[0][0] <= 4 * (3 * 7 + 1)

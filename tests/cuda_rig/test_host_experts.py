"""Experts on the host over CUDA: what is forecast, and how often a step waits and copies."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning
from cuda_rig.test_experts import CONFIG
from cuda_rig.values import values

import duoka
from duoka.cli.main import run
from duoka.engine import Engine, SamplingParams
from duoka.engine.executor import InlineExecutor, outcomes_of
from duoka.engine.sampler import SamplingRow
from duoka.forecast.serving import Capacity
from duoka.planner.constraints import Constraints
from duoka.runtime.call.chunk import Chunk

LAYERS = 2
SEGMENT_BYTES = 2**21
CACHE_BYTES = 6 * 2**20
SMALL_BYTES = 4096  # a step ahead, and its tokens
PROMPTS = [[*range(length)] for length in (1, 5, 17, 40)]
ROW = SamplingRow(params=SamplingParams(), seed=0, place=0)
LOG = Path(tempfile.gettempdir()) / f"duoka-host-experts-{os.getpid()}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tuning.write_of_config(tmp_path, **{**CONFIG, "num_hidden_layers": LAYERS})


def make_plan(model: Path, scheme: Any, gpus: str = "1GiB", way: Any = "compute") -> duoka.Plan:
    work = duoka.Workload(
        cache="paged", batch=3, prompt_tokens=40, new_tokens=24, dtype="bfloat16",
        prefill_chunk_tokens=16, pages=4, page_tokens=256, quantize=scheme,
    )  # fmt: skip
    fleet = duoka.Fleet.parse(gpus).with_host("1GiB,30GB/s")
    cache = CACHE_BYTES * LAYERS if way == "fetch" else None
    constraints = Constraints(experts="host", host_experts=way, expert_cache=cache)
    return duoka.plan(model, fleet, work, use_all="," in gpus, constraints=constraints)


@pytest.mark.cuda_rig(gpus="1GiB")
@pytest.mark.usefixtures("engine_computes_small")
@pytest.mark.parametrize("scheme", ["none", "int8", "int4", "nf4"])
@pytest.mark.parametrize("way", ["compute", "fetch"])
def test_serving_takes_what_is_forecast(model: Path, scheme: Any, way: str) -> None:
    plan = make_plan(model, scheme, way=way)
    assert len(plan.host_experts) == LAYERS
    with Engine(plan) as engine:
        assert len(engine.generate(PROMPTS, SamplingParams(max_new_tokens=6))) == len(PROMPTS)
        assert engine.fallbacks() == []
    (stage,) = plan.forecast.devices
    # Steps with a cache are forecast by the most memory of any step, as if of a few tensors.
    difference = SEGMENT_BYTES if way == "fetch" else 0
    assert abs(torch.cuda.max_memory_reserved(0) - stage.reserved_bytes) <= difference
    allocated = torch.cuda.max_memory_allocated(0)
    assert 0.96 * stage.allocated_bytes <= allocated <= stage.allocated_bytes + SMALL_BYTES


@pytest.mark.cuda_rig(gpus="1GiB")
@pytest.mark.usefixtures("engine_computes_small")
@pytest.mark.parametrize("scheme", ["none", "int4"])
@pytest.mark.parametrize("way", ["compute", "fetch"])
def test_generate_takes_what_is_forecast(
    model: Path, scheme: str, way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    words = "--gpus 0 --context 128 --new-tokens 50 --dtype bfloat16 --experts host --json"
    words += f" --host-experts {way}" + (
        f" --expert-cache {CACHE_BYTES}B" if way == "fetch" else ""
    )
    options = [*words.split(), "--quantize", scheme, "--host-memory", "1GiB,30GB/s"]
    assert run(["generate", str(model), *options, "-p", "ab", "-p", "abc" * 9]) == 0
    measured = json.loads(capfd.readouterr().out)["measured"]
    ((peak,), (stage,)) = measured["devices"], measured["forecast"]
    assert 0 <= stage["reserved_bytes"] - peak["reserved_bytes"] <= SEGMENT_BYTES


@pytest.mark.cuda_rig(gpus="1GiB", log=LOG)
@pytest.mark.parametrize("scheme", ["none", "int4"])
def test_a_layer_waits_once_and_copies_four_times(model: Path, scheme: Any) -> None:
    """Its tokens, their experts and weights go to the host together, and the sum comes back."""
    counts = count_step(make_plan(model, scheme))
    # Each step copies a table to the GPU, and waits for the sampled tokens.
    assert counts == {
        "wait for a stream": LAYERS, "wait for an event": 1, "launch": LAYERS + 3,
        "to host": 3 * LAYERS + 1, "to GPU": LAYERS + 1, "pageable": 0, "graph": LAYERS + 1,
    }  # fmt: skip


@pytest.mark.cuda_rig(gpus="1GiB", log=LOG)
@pytest.mark.parametrize(("scheme", "tensors"), [("none", 2), ("int4", 4)])
def test_a_layer_waits_for_its_routing_and_copies_missing_experts(
    model: Path, scheme: Any, tensors: int
) -> None:
    """All tokens choose the same experts here: a second step copies none."""
    plan = make_plan(model, scheme, way="fetch")
    chosen = CONFIG["num_experts_per_tok"]
    counts = {
        "wait for a stream": LAYERS, "wait for an event": 1, "launch": LAYERS + 3,
        "to host": LAYERS + 1, "to GPU": LAYERS + 1, "pageable": 0, "graph": LAYERS + 1,
    }  # fmt: skip
    assert count_step(plan) == counts
    copies = LAYERS * chosen * tensors
    counts["to GPU"] += copies
    assert count_step(plan, forgets=True) == counts


@pytest.mark.cuda_rig(gpus="1GiB", log=LOG)
@pytest.mark.usefixtures("engine_computes")
@pytest.mark.parametrize("scheme", ["none", "int8"])
@pytest.mark.parametrize("way", ["compute", "fetch"])
def test_answers_are_those_without_graphs(model: Path, scheme: Any, way: str) -> None:
    plan = make_plan(model, scheme, way=way)
    params = SamplingParams(max_new_tokens=10)
    answers = []
    with values(most=None):
        for cuda_graphs in (False, plan.workload.cuda_graphs):
            workload = replace(plan.workload, cuda_graphs=cuda_graphs)
            with Engine(replace(plan, workload=workload)) as engine:
                start = LOG.stat().st_size
                completions = engine.generate(PROMPTS[:2], params)
                num_graphs = LOG.read_text()[start:].count("graph of")
                assert engine.fallbacks() == []
            answers.append([[c.token for c in answer.tokens] for answer in completions])
    assert answers[0] == answers[1]
    assert num_graphs >= 8 * (LAYERS + 1)


@pytest.mark.cuda_rig(gpus="1GiB,1GiB", copy_limit="1GiB", log=LOG)
@pytest.mark.usefixtures("engine_computes_small")
def test_stages_replay_graphs_between_their_layers(model: Path) -> None:
    plan = make_plan(model, "int4", gpus="1GiB,1GiB")
    assert len(plan.devices) == 2
    with Engine(plan, processes=True) as engine:
        engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=10))
        start = LOG.stat().st_size
        engine.generate([[3, 2, 1]], SamplingParams(max_new_tokens=10))
        assert LOG.read_text()[start:].count("graph of") == 9 * (LAYERS + len(plan.devices))
    for peak, stage in zip(engine.peaks(), plan.forecast.devices, strict=True):
        assert peak.device == stage.device
        # Without numbers no expert is in use, so that prompts take less than is forecast.
        assert 0 <= stage.reserved_bytes - peak.reserved_bytes <= SEGMENT_BYTES


@pytest.mark.cuda_rig(gpus="1GiB", log=LOG)
@pytest.mark.parametrize(("scheme", "tensors"), [("none", 2), ("int8", 4), ("int4", 4)])
def test_a_chunk_fetches_the_experts_in_use_once(model: Path, scheme: Any, tensors: int) -> None:
    """From pinned memory, as all tokens choose the same experts here."""
    plan = make_plan(model, scheme)
    chunk = Chunk(0, [*range(16)], 0, [0], ROW)
    executor = InlineExecutor(duoka.load(plan), Capacity.of(plan.workload), plan.workload)
    with values(), torch.no_grad():
        executor.start()
        start = LOG.stat().st_size
        outcomes_of([chunk], executor.sample([chunk]))
        lines = LOG.read_text()[start:].splitlines()
    executor.close()
    copies = [line for line in lines if line.startswith("copy -1 to 0")]
    sizes = [int(line.split()[4]) for line in copies]
    fetched = CONFIG["num_experts_per_tok"] * LAYERS
    assert len(copies) == 1 + fetched * tensors  # the table of the step
    expert_bytes = plan.forecast.expert_bytes // LAYERS // CONFIG["num_experts"]
    assert sum(sizes[1:]) == fetched * expert_bytes
    assert not any("pageable" in line for line in copies)
    assert sum(line == "wait for a stream" for line in lines) == LAYERS


def count_step(plan: duoka.Plan, *, forgets: bool = False) -> Counter[str]:
    """Count the waits of a decode step and its copies by direction, in the rig's log."""
    model: Any = duoka.load(plan)
    executor = InlineExecutor(model, Capacity.of(plan.workload), plan.workload)
    with values(), torch.no_grad():
        executor.start()
        for position in range(7, 12):  # the first steps get pinned memory from the driver
            for cache in model.buffers() if forgets else ():
                cache.__dict__.pop("slot_of", None)
            start = LOG.stat().st_size
            chunks = [Chunk(0, [7], position, [0], ROW)]
            outcomes_of(chunks, executor.sample(chunks))
            lines = LOG.read_text()[start:].splitlines()
    executor.close()
    counts = Counter(line for line in lines if line.startswith("wait"))
    counts["to host"] = sum(line.startswith("copy 0 to -1") for line in lines)
    counts["to GPU"] = sum(line.startswith("copy -1 to 0") for line in lines)
    counts["launch"] = sum(line.startswith("launch") for line in lines)
    counts["graph"] = sum("graph of" in line for line in lines)
    counts["pageable"] = sum("pageable" in line for line in lines)
    return counts

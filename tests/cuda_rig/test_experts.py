"""Quantized experts over CUDA: what is forecast, and how many kernels a step launches."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning
from cuda_rig.values import values

import duoka
from duoka.engine import Engine, SamplingParams
from duoka.engine.executor import InlineExecutor, outcomes_of
from duoka.engine.sampler import SamplingRow
from duoka.forecast.serving import Capacity
from duoka.runtime.call.chunk import Chunk

EXPERTS, EACH = 16, 4
CONFIG = {
    "model_type": "qwen3_moe", "hidden_size": 256, "num_hidden_layers": 3, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": EXPERTS,
    "num_experts_per_tok": EACH, "moe_intermediate_size": 192, "intermediate_size": 512,
    "max_position_embeddings": 4096,
}  # fmt: skip
WORK = duoka.Workload(
    cache="paged", batch=9, prompt_tokens=100, new_tokens=28, dtype="bfloat16",
    prefill_chunk_tokens=64, pages=12, page_tokens=256,
)  # fmt: skip
# Launches of a step without graphs, at most: of one token, and of four; three layers.
MOST = {"int8": (258, 360), "int4": (240, 336), "nf4": (240, 348)}
LOG = Path(tempfile.gettempdir()) / f"duoka-experts-{os.getpid()}"
PROMPTS = [[*range(length)] for length in (1, 5, 17, 60, 100, 3, 8)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tuning.write_of_config(tmp_path, **CONFIG)


pytestmark = pytest.mark.usefixtures("engine_computes_small")


@pytest.mark.cuda_rig(gpus="1GiB")
@pytest.mark.parametrize("scheme", ["int8", "int4", "nf4"])
def test_serving_takes_what_is_forecast(model: Path, scheme: Any) -> None:
    plan = duoka.plan(model, "1GiB", replace(WORK, quantize=scheme))
    assert plan.workload.cuda_graphs == EXPERTS // EACH
    with Engine(plan) as engine:
        params = SamplingParams(max_new_tokens=6)
        assert len(engine.generate(PROMPTS, params)) == len(PROMPTS)
        assert engine.fallbacks() == []
    (stage,) = plan.forecast.devices
    assert torch.cuda.max_memory_reserved(0) == stage.reserved_bytes
    allocated = torch.cuda.max_memory_allocated(0)
    assert 0.97 * stage.allocated_bytes <= allocated <= stage.allocated_bytes


def count_step(model: Path, tokens: int, **work: Any) -> list[str]:
    """Return the launches of a decode step of a number of sequences, after some of them."""
    plan = duoka.plan(model, "1GiB", replace(WORK, **work))
    row = SamplingRow(params=SamplingParams(), seed=0, place=0)
    executor = InlineExecutor(duoka.load(plan), Capacity.of(plan.workload), plan.workload)
    with values(), torch.no_grad():
        executor.start()
        for place in range(20, 24):
            done = LOG.stat().st_size
            chunks = [Chunk(at, [7], place + at, [at], row) for at in range(tokens)]
            outcomes_of(chunks, executor.sample(chunks))
    executor.close()
    lines = LOG.read_text()[done:].splitlines()
    return [line for line in lines if line.startswith(("launch", "wait"))]


@pytest.mark.cuda_rig(gpus="1GiB", log=LOG)
@pytest.mark.parametrize("scheme", ["int8", "int4", "nf4"])
def test_a_decode_step_is_one_graph(model: Path, scheme: Any) -> None:
    """As of a dense model: a graph, and two launches to sample; the host waits for the tokens."""
    for tokens in (1, EXPERTS // EACH):
        lines = count_step(model, tokens, quantize=scheme)
        assert sum("graph" in line for line in lines) == 1
        assert sum(line.startswith("launch") for line in lines) <= 3
        assert sum(line.startswith("wait") for line in lines) == 1
    LOG.unlink()


@pytest.mark.cuda_rig(gpus="1GiB", log=LOG)
@pytest.mark.parametrize("scheme", MOST)
def test_a_decode_step_without_graphs(model: Path, scheme: Any) -> None:
    """Launches of one token and of several, of which each selects its experts."""
    for tokens, most in zip((1, EXPERTS // EACH), MOST[scheme], strict=True):
        lines = count_step(model, tokens, quantize=scheme, cuda_graphs=False)
        assert sum(line.startswith("launch") for line in lines) <= most
        assert sum(line.startswith("wait") for line in lines) == 1
    LOG.unlink()

"""Memory that somebody else has taken: who asked for it is told why, and the rest goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoints import write_random

import duoka
from duoka import virtual
from duoka.api.plan import plan_request
from duoka.engine import Engine, SamplingParams
from duoka.planner.out_of_memory import OutOfMemory, look_for_ways
from duoka.runtime.out_of_memory import explain
from duoka.tools.demo.checkpoint import CONFIG

WIDE = {
    **CONFIG,
    "seq_length": 4096,
    "hidden_size": 128,
    "ffn_hidden_size": 2048,
    "num_layers": 3,
    "num_attention_heads": 4,
    "kv_channels": 32,
}
WORK = duoka.Workload(
    prompt_tokens=2040, new_tokens=8, cache="int8", dtype="float32", prefill_chunk_tokens=None
)
SHORT = [5, 6, 7, 8]
LONG = [5, 6, 7] * 430


@contextmanager
def taken(index: int) -> Iterator[None]:
    """All that a virtual GPU has left is somebody else's."""
    allocator = virtual.active_world().gpu(index).settle()
    allocator.empty_cache()
    capacity, allocator.capacity_bytes = allocator.capacity_bytes, allocator.reserved_bytes
    try:
        yield
    finally:
        allocator.capacity_bytes = capacity


@pytest.mark.slow
def test_it_is_explained_and_the_next_answer_comes(tmp_path: Path) -> None:
    path = write_random(tmp_path, WIDE, seed=3)
    plan = duoka.plan(path, "virtual:2x256MiB", WORK, use_all=True)
    params = SamplingParams(max_new_tokens=4)
    with Engine(plan) as engine:
        before = engine.submit(SHORT, params).result()
        with taken(1), pytest.raises(OutOfMemory) as failed:
            engine.submit(LONG, params).result()
        assert engine.submit(SHORT, params).result() == before
        assert engine.submit(LONG, params).result().tokens
        assert engine.load().free_pages == engine.capacity.pages
    error = failed.value
    asked, place, filled, others = str(error).splitlines()
    assert "out of memory, for 1290 tokens: vgpu out of memory. Tried to allocate" in asked
    assert "GPU 1 has" in asked
    assert place.startswith("requested by transformers/models/glm/modeling_glm.py:")
    assert ", in model.layers." in place
    assert filled.startswith("on vgpu:1 now (planned): weights ")
    assert others.startswith("other programs use")
    stage = plan.forecast.devices[1]
    assert error.available_bytes["vgpu:1"] < stage.reserved_bytes
    # With so little on one of them another cut is found.
    look_for_ways(error, plan_request)
    assert error.hint is not None
    assert error.hint.startswith(
        "plan with the memory that is free now: --gpus vgpu:0 256.00 MiB, vgpu:1"
    )
    # With as little on both none is, but there are ways.
    error.available_bytes["vgpu:0"] = error.available_bytes["vgpu:1"]
    look_for_ways(error, plan_request)
    assert 0 < len(error.ways_out) <= 3


def test_what_cannot_be_told_hides_no_error() -> None:
    class Busy:
        def look(self) -> None:
            raise RuntimeError("a cache changed while it was looked at")

    error = torch.OutOfMemoryError("CUDA out of memory")
    assert explain(error, Busy()) is error  # type: ignore[arg-type]
    assert not hasattr(error, "__notes__")

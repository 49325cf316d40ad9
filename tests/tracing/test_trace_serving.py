"""Profiles of steps over pages: cut as those of a batch are, and exact at sizes between samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import families
import pytest
import torch
from tiers import only

from duoka import Workload, virtual
from duoka.checkpoint.architecture import reads_block_tables
from duoka.errors import ModelError
from duoka.forecast.profile import Profile, evaluate
from duoka.forecast.replay_serving import ServingReplay
from duoka.planner.placement import Placement
from duoka.runtime.call.paged_model import PagedModel
from duoka.runtime.dispatch.dispatch import dispatch, without_data
from duoka.tracing import TraceSpec, trace, trace_serving

WORK = Workload(
    cache="paged", batch=3, prompt_tokens=70, new_tokens=9, prefill_chunk_tokens=40, pages=21
)


def profile_of(name: str, work: Workload = WORK) -> Profile:
    model = without_data(families.build(name).eval())
    return trace_serving(model, TraceSpec(fingerprint="", conditions=work.conditions))


@pytest.mark.parametrize("name", only(["glm"], ["llama", "glm", "gpt2", "qwen3", "opt"]))
def test_blocks_are_those_of_a_batch(name: str) -> None:
    model = without_data(families.build(name).eval())
    expected = trace(model, TraceSpec(fingerprint="", conditions=Workload().conditions))
    found = profile_of(name)
    assert [block.modules for block in found.blocks] == [b.modules for b in expected.blocks]


@pytest.mark.parametrize("cache", ["paged", "paged-int8", "block tables"])
@pytest.mark.parametrize("name", only(["llama"], ["llama", "gemma2", "gpt_oss", "gemma3_text"]))
def test_steps_take_what_the_profile_says(name: str, cache: Any) -> None:
    work = replace(WORK, cuda_graphs=False)  # which virtual GPUs don't have
    work = replace(work, **{"page_tokens": 256} if cache == "block tables" else {"cache": cache})
    if cache == "block tables" and not reads_block_tables(families.build(name).config.to_dict()):
        pytest.skip("not in FlashAttention")
    profile = profile_of(name, work)
    replay = ServingReplay(profile, work)
    forecast = replay.run(range(len(profile.blocks)))
    assert forecast is not None
    generation = work.gpu_generation
    with torch.no_grad(), virtual.gpus([None], data="meta", generation=generation) as world:
        model = families.build(name).eval()
        dispatch(model, Placement(entries=(("", "vgpu:0"),)))
        PagedModel(model, replay.capacity, virtual.virtual_device(0)).warm_up()
        assert world.max_memory_allocated(0) == forecast.allocated_bytes
        assert world.max_memory_reserved(0) == forecast.reserved_bytes


def test_work_is_that_of_a_step_without_ways_to_draw() -> None:
    profile = profile_of("llama")
    step = ServingReplay(profile, WORK, brief=True).step_over(1, 70)
    *_, layer, _, head, drawing = (
        evaluate(profile.kinds[block.kind].traces[step.regime].launches, step.values)
        for block in profile.blocks
    )
    assert layer > head > 0 == drawing


def test_what_cant_read_pages_is_refused() -> None:
    for name in ("t5", "mamba"):
        with pytest.raises(ModelError, match="doesn't support a paged KV cache"):
            profile_of(name)

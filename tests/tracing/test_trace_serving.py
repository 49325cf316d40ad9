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
from duoka.forecast.allocator import ROUND_BYTES, SMALL_SEGMENT_BYTES
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


@pytest.mark.usefixtures("every_step")
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


def test_graphs_have_a_pool_without_sampling() -> None:
    """One workspace more is allocated in the end; the pool has whole segments."""
    work = replace(WORK, page_tokens=256)
    profile = profile_of("llama", work)
    blocks = range(len(profile.blocks))
    replays = [
        ServingReplay(profile, replace(work, cuda_graphs=graphs)) for graphs in (True, False)
    ]
    (graphs, plain) = (replay.run(blocks) for replay in replays)
    assert graphs is not None
    assert plain is not None
    assert [step.query for step in replays[0].steps if step.is_graph] == [3, 2, 1]
    assert len(replays[0].steps) == len(replays[1].steps) + 3
    workspace = replays[0].workspace_bytes + 3 * 2 * ROUND_BYTES
    assert graphs.allocated_bytes == plain.allocated_bytes + workspace
    pool_bytes = graphs.reserved_bytes - plain.reserved_bytes
    assert pool_bytes == SMALL_SEGMENT_BYTES
    # Of the pool alone too many bytes may be reserved.
    limit = graphs.reserved_bytes - 1
    assert replays[0].run(blocks, limit) is None
    assert replays[1].run(blocks, limit) is not None
    assert any(trace.sampling_at for kind in profile.kinds for trace in kind.traces)


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

"""How much a decode step launches and copies on CUDA: counts that stand for its time."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tuning
from cuda_rig.values import values
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import duoka
from duoka.engine.executor import InlineExecutor, outcomes_of
from duoka.engine.request import SamplingParams
from duoka.engine.sampler import SamplingRow
from duoka.forecast.serving import Capacity
from duoka.runtime.call.chunk import Chunk
from duoka.runtime.call.paged_model import PagedModel

WORK = duoka.Workload(
    cache="paged", batch=3, prompt_tokens=100, new_tokens=28, dtype="float32",
    prefill_chunk_tokens=20, pages=20,
)  # fmt: skip
ROW = SamplingRow(params=SamplingParams(), seed=0, place=0)
PAGES = list(range(8))
# Launches and copies of a step on two GPUs, at most: two layers, and four.
MOST = {"shallow": (87, 11), "llama": (157, 13)}
# What a row asks for, and by how many launches and copies the step is longer.
ROWS = {
    "greedy": ROW,
    "drawn": replace(ROW, params=SamplingParams(temperature=0.7, top_k=5, top_p=0.9)),
    "changed": replace(ROW, params=SamplingParams(presence_penalty=1.0), answer=(3, 4)),
    "masked": replace(ROW, allowed=b"\xff" * 8),
    "reported": replace(ROW, params=SamplingParams(logprobs=3)),
}
LOG = Path(tempfile.gettempdir()) / f"duoka-launches-{os.getpid()}"


def count_steps(
    tmp_path: Path, family: str, gpus: str, row: SamplingRow = ROW
) -> list[Counter[str]]:
    """Count what fifty decode steps do, each by itself: the first words of the rig's log."""
    path = tuning.write_model(family, tmp_path / family)
    plan = duoka.plan(path, gpus, WORK, use_all=True)
    executor = InlineExecutor(duoka.load(plan), Capacity.of(WORK), WORK, warm_up="every")
    steps = []
    with values(), torch.no_grad():
        executor.start()
        for place in range(7, 60):  # the first steps get pinned memory from the driver
            done = LOG.stat().st_size
            chunks = [Chunk(0, [7], place, PAGES, row)]
            outcomes_of(chunks, executor.sample(chunks))
            lines = LOG.read_text()[done:].splitlines()
            steps.append(Counter(line.split()[0] for line in lines))
            steps[-1]["pageable"] = sum("copy -1" in line and "pageable" in line for line in lines)
    executor.close()
    LOG.unlink()
    return steps[3:]


@pytest.mark.cuda_rig(gpus="2x1GiB", log=LOG)
@pytest.mark.parametrize("family", MOST)
def test_a_decode_step_launches_as_much_as_the_one_before(tmp_path: Path, family: str) -> None:
    steps = count_steps(tmp_path, family, "1GiB,1GiB")
    assert all(step == steps[0] for step in steps), steps
    launches, copies = MOST[family]
    assert 0 < steps[0]["launch"] <= launches
    assert steps[0]["copy"] <= copies


@pytest.mark.cuda_rig(gpus="1GiB", log=LOG)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_host_waits_once_per_step(tmp_path: Path, row: SamplingRow) -> None:
    """For the tokens; everything else goes to the GPU from pinned memory, without waiting."""
    for step in count_steps(tmp_path, "llama", "1GiB", row):
        assert (step["wait"], step["pageable"]) == (1, 0), step


@pytest.mark.cuda_rig(gpus="24GiB", log=LOG)
@pytest.mark.parametrize("context", [512, 8192])
@pytest.mark.parametrize("batch", [1, 16])
def test_block_tables_launch_as_much_as_a_plain_forward(batch: int, context: int) -> None:
    """With FlashAttention, a decode step launches the same at any context."""
    config = LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=512, max_position_embeddings=2**14, dtype="bfloat16",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to("cuda:0")

    def count(run: Callable[[], object]) -> int:
        done = LOG.stat().st_size
        run()
        return sum(line.startswith("launch") for line in LOG.read_text()[done:].splitlines())

    with torch.no_grad(), values():
        cache = DynamicCache(config=config)
        tokens = torch.zeros(batch, 1, dtype=torch.long, device="cuda:0")
        model(tokens, past_key_values=cache)
        mask = torch.ones(batch, 2, dtype=torch.long, device="cuda:0")  # as `generate` makes it
        plain = count(lambda: model(tokens, past_key_values=cache, attention_mask=mask))
        paged = PagedModel(
            model,
            Capacity(
                sequences=batch, context_tokens=context, pages=batch * context // 256,
                page_tokens=256, step_tokens=512,
            ),
        )  # fmt: skip
        paged.start()
        pages = list(range(context // 256))
        chunks = [Chunk(number, [1], context - 1 - number, pages, ROW) for number in range(batch)]
        assert count(lambda: paged.run(chunks)) <= 1.05 * plain
    LOG.unlink()

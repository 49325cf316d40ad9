"""How much a decode step launches and copies on CUDA: counts that stand for its time."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import tuning
from cuda_rig.values import values

import duoka
from duoka.engine.executor import InlineExecutor
from duoka.engine.request import SamplingParams
from duoka.engine.sampler import SamplingRow
from duoka.forecast.serving import Capacity
from duoka.runtime.call.chunk import Chunk

WORK = duoka.Workload(
    cache="paged", batch=3, prompt_tokens=100, new_tokens=28, dtype="float32",
    prefill_chunk_tokens=20, pages=20,
)  # fmt: skip
ROW = SamplingRow(params=SamplingParams(), seed=0, place=0)
PAGES = list(range(8))
# Launches and copies of a step on two GPUs, at most: two layers, and four.
MOST = {"shallow": (94, 13), "llama": (164, 15)}
LOG = Path(tempfile.gettempdir()) / f"duoka-launches-{os.getpid()}"


@pytest.mark.cuda_rig(gpus="2x1GiB", log=LOG)
@pytest.mark.parametrize("family", MOST)
def test_a_decode_step_launches_as_much_as_the_one_before(tmp_path: Path, family: str) -> None:
    path = tuning.write_model(family, tmp_path / family)
    plan = duoka.plan(path, "1GiB,1GiB", WORK, use_all=True)
    executor = InlineExecutor(duoka.load(plan), Capacity.of(WORK), WORK, warm_up="every")
    steps = []
    with values(), torch.no_grad():
        executor.start()
        executor.run([Chunk(0, list(range(5, 15)), 0, PAGES, ROW)])
        for place in range(10, 60):
            done = LOG.stat().st_size
            executor.run([Chunk(0, [7], place, PAGES, ROW)])
            lines = LOG.read_text()[done:].splitlines()
            steps.append(Counter(line.split()[0] for line in lines))
    executor.close()
    LOG.unlink()
    assert all(step == steps[0] for step in steps), steps
    launches, copies = MOST[family]
    assert 0 < steps[0]["launch"] <= launches
    assert steps[0]["copy"] <= copies

"""What an engine allocates in a step: nothing more with every token, and nothing that stays."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tuning
from counting import Counts

import duoka
from duoka import virtual
from duoka.engine.executor import InlineExecutor
from duoka.engine.request import SamplingParams
from duoka.engine.sampler import SamplingRow
from duoka.forecast.serving import Capacity
from duoka.runtime.call.cached_model import CachedModel
from duoka.runtime.call.chunk import Chunk

pytestmark = pytest.mark.usefixtures("every_step")

WORK = duoka.Workload(
    cache="paged", batch=3, prompt_tokens=100, new_tokens=28, dtype="float32",
    prefill_chunk_tokens=20, pages=30,
)  # fmt: skip
ROW = SamplingRow(params=SamplingParams(), seed=0, place=0)
PAGES = list(range(8))


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_a_decode_step_allocates_as_much_as_the_one_before(tmp_path: Path, num_gpus: int) -> None:
    path = tuning.write_model("shallow", tmp_path / "model")
    plan = duoka.plan(path, f"virtual:{num_gpus}x64MiB", WORK, use_all=True)
    executor = InlineExecutor(duoka.load(plan), Capacity.of(WORK), WORK, warm_up="every")
    executor.start()
    assert executor.is_paged
    world: Any = virtual.active_world()

    def sizes() -> list[tuple[int, int]]:
        names = range(num_gpus)
        return [(world.memory_allocated(n), world.memory_reserved(n)) for n in names]

    steps, kept = [], []
    with torch.no_grad():
        executor.run([Chunk(0, list(range(5, 15)), 0, PAGES, ROW)])
        warmed_up = sizes()
        for place in range(10, 100):
            counts = Counts()
            with virtual.observe(counts):
                executor.run([Chunk(0, [7], place, PAGES, ROW)])
            steps.append((counts.allocations, counts.num_bytes, counts.copies))
            assert counts.allocations == counts.frees
            kept.append(sizes())
    executor.close()
    assert all(step == steps[0] for step in steps)
    assert kept == [warmed_up] * len(kept)
    # One table; where the last device isn't the first one, also the rows of logits.
    copies = steps[0][2]
    assert sum(n for copy, n in copies.items() if copy[0] == "cpu") == num_gpus
    # A hidden state; cosines, sines and positions; pages. They are moved once, not for each layer.
    assert sum(n for copy, n in copies.items() if copy[:2] == ("vgpu:0", "vgpu:1")) == (
        5 if num_gpus == 2 else 0
    )


def test_a_model_without_pages_moves_once_what_all_layers_read(tmp_path: Path) -> None:
    path = tuning.write_model("shallow", tmp_path / "model")
    work = replace(WORK, cache="dynamic", pages=None)
    plan = duoka.plan(path, "virtual:2x64MiB", work, use_all=True)
    model = CachedModel(duoka.load(plan), plan.workload)
    model.run([Chunk(0, list(range(5, 15)), 0, [0], ROW)])
    for place in range(10, 13):
        counts = Counts()
        with virtual.observe(counts):
            model.run([Chunk(0, [7], place, [0], ROW)])
        copies = [copy for copy in counts.copies.elements() if copy[:2] == ("vgpu:0", "vgpu:1")]
        shapes = Counter(shape for _, _, shape in copies)
        assert shapes == {(1, 1, 32): 1, (1, 1, 8): 2, (1, 1): 1}

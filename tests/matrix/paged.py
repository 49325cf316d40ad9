"""Pages: steps of a model in stages give the logits of the whole model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import families
import torch
from families import Family
from staging import placement_of
from torch import Tensor

from duoka.checkpoint.architecture import caches_latents, reads_block_tables
from duoka.engine.request import SamplingParams
from duoka.engine.sampler import SamplingRow
from duoka.errors import ModelError
from duoka.forecast.serving import Capacity
from duoka.runtime.call.chunk import Chunk
from duoka.runtime.call.paged_model import PagedModel, reading_pages, reads_pages
from duoka.stages.channels import LocalChannel
from duoka.stages.interceptor import BlockInterceptor
from duoka.stages.micro_batch import StageMicroBatch
from duoka.stages.route import find_step_routes

ROW = SamplingRow(params=SamplingParams(), seed=0, place=0)
CPU = torch.device("cpu")
CAPACITY = Capacity(sequences=3, context_tokens=20, pages=15, page_tokens=4, step_tokens=15)


def steps_of(rng: random.Random, number: int = 4) -> list[list[Chunk]]:
    """Three sequences that grow by random numbers of tokens."""
    lengths = [0, 0, 0]
    steps = []
    for _ in range(number):
        chunks = []
        for sequence in rng.sample(range(3), rng.randrange(1, 4)):
            tokens = [rng.randrange(3, families.VOCABULARY) for _ in range(rng.choice([1, 1, 5]))]
            pages = list(range(5 * sequence, 5 * sequence + 5))
            row = rng.choice([ROW, ROW, None])
            chunks.append(Chunk(sequence, tokens, lengths[sequence], pages, row))
            lengths[sequence] += len(tokens)
        steps.append(chunks)
    return steps


def in_stages(model: Any, placement: Any, steps: list[list[Chunk]]) -> list[Tensor]:
    routes = find_step_routes(model, placement)
    interceptor, channel = (
        BlockInterceptor(model, placement),
        LocalChannel([CPU] * len(routes.devices)),
    )
    # Each device has pages of its own.
    models = {name: PagedModel(model, CAPACITY, is_known=True) for name in routes.devices}
    logits = []
    for number, chunks in enumerate(steps):
        paged = {name: one.step(chunks) for name, one in models.items()}
        step = paged[routes.devices[0]]
        route = routes.at(step.num_tokens, len(step.last_rows))
        for stage, name in enumerate(routes.devices):
            part = StageMicroBatch(route, stage, number, channel, CPU, learns=False)
            result = part.forward(interceptor, models[name].call(paged[name], CPU))
        assert result is not None
        logits.append(result)
    return logits


def check(family: Family) -> None:
    """Compare logits, and whether a common family can read from pages."""
    number = 3 if family.name in families.FAST[::2] else 2
    is_paged = reads_in_stages(family.name, family.model(), number)
    assert is_paged == (family.name in families.PAGED) or family.name not in families.FAST


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def reads_in_stages(name: str, model: Any, number: int) -> bool:
    """Compare stages with the whole model; return False where that can't read from pages."""
    if not reads_pages(model):
        return False
    steps = steps_of(random.Random(name))
    whole = PagedModel(model, CAPACITY)
    try:
        with reading_pages(model):
            whole.warm_up("first")
    except ModelError:
        return False
    with torch.inference_mode():
        expected = [whole.run(chunks) for chunks in steps]
    whole.close()
    config = model.config.to_dict()
    sizes = [256] * reads_block_tables(config) + [32] * caches_latents(config)
    for size in sizes:
        in_place = PagedModel(model, replace(CAPACITY, page_tokens=size))
        with torch.inference_mode():
            in_place.start()
            assert_close([in_place.run(chunks) for chunks in steps], expected)
        in_place.close()
    placement = placement_of(model, families.inputs(model), number)
    with torch.inference_mode():
        assert_close(in_stages(model, placement, steps), expected)
    return True

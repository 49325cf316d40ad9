"""Steps of models in stages give the logits of the whole model, for every family and step."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import families
import pytest
import torch
from staging import placement_of
from torch import Tensor

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

pytestmark = pytest.mark.filterwarnings("ignore")

ROW = SamplingRow(params=SamplingParams(), seed=0, place=0)
NOT_BUILT = {name for names in families.UNBUILT.values() for name in names}
OTHERS = sorted(set(families.all_names()) - set(families.FAST) - NOT_BUILT)
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
    models = {name: PagedModel(model, CAPACITY) for name in routes.devices}
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


def compare(name: str, number: int = 2) -> bool:
    """Hold stages against the whole model; False where that can't read from pages."""
    model: Any = families.build(name).eval()
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
    placement = placement_of(model, families.inputs(model), number)
    with torch.inference_mode():
        found = in_stages(model, placement, steps)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    return True


@pytest.mark.parametrize("name", families.sample(families.FAST))
def test_family(name: str) -> None:
    number = 3 if name in families.FAST[::2] else 2
    assert compare(name, number) == (name in families.PAGED)


@pytest.mark.parametrize("name", ["llama", "gemma2", "glm"])
def test_pages_of_8_bit_give_nearly_the_same_logits(name: str) -> None:
    model: Any = families.build(name).eval()
    steps, found = steps_of(random.Random(name), 6), []
    for is_int8 in (False, True):
        paged = PagedModel(model, replace(CAPACITY, is_int8=is_int8))
        found.append(torch.cat([paged.run(chunks) for chunks in steps]))
        paged.close()
    distance = (found[0] - found[1]).norm() / found[0].norm()
    assert 0 < distance < 0.02


@pytest.mark.sweep
@pytest.mark.parametrize("name", OTHERS)
def test_other_family(name: str) -> None:
    compare(name)

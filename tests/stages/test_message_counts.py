"""How many tensors go from stage to stage: a count that stands for the time of a step."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import families
import pytest
import torch
from staging import learn_in_stages, placement_of
from torch import Tensor

from duoka import Placement
from duoka.engine.request import SamplingParams
from duoka.engine.sampler import SamplingRow
from duoka.forecast.serving import Capacity
from duoka.runtime.call.chunk import Chunk
from duoka.runtime.call.paged_model import PagedModel
from duoka.stages.channels import LocalChannel, TensorMessage
from duoka.stages.interceptor import BlockInterceptor
from duoka.stages.micro_batch import StageMicroBatch
from duoka.stages.route import find_step_routes

CPU = torch.device("cpu")
CAPACITY = Capacity(sequences=3, context_tokens=20, pages=15, page_tokens=4, step_tokens=15)
ROW = SamplingRow(params=SamplingParams(), seed=0, place=0)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """What is sent: from which stage to which, and the shape."""
    counts: Counter[Any] = Counter()
    send = LocalChannel.send

    def counted(self: LocalChannel, message: TensorMessage, tensor: Tensor) -> None:
        counts[message.sender, message.receiver, tuple(tensor.shape)] += 1
        send(self, message, tensor)

    monkeypatch.setattr(LocalChannel, "send", counted)
    return counts


def has_layers(placement: Placement, stage: int) -> bool:
    """Whether there is a layer in a stage; there may be the norm and the head alone."""
    at = placement.devices[stage]
    return any(name.startswith("model.layers.") and on == at for name, on in placement.entries)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_step_of_the_engine(sent: Counter[Any], num_stages: int) -> None:
    model: Any = families.build("llama").eval()
    placement = placement_of(model, families.inputs(model), num_stages)
    hidden, head = model.config.hidden_size, model.config.head_dim
    rng = random.Random(1)
    with torch.inference_mode():
        routes = find_step_routes(model, placement)
        interceptor, channel = BlockInterceptor(model, placement), LocalChannel([CPU] * num_stages)
        models = {name: PagedModel(model, CAPACITY, is_known=True) for name in routes.devices}
        for number, (start, size) in enumerate([(0, 9), (9, 1), (10, 1)]):
            tokens = [rng.randrange(3, families.VOCABULARY) for _ in range(size)]
            chunks = [Chunk(0, tokens, start, list(range(5)), ROW)]
            paged = {name: one.step(chunks) for name, one in models.items()}
            step = paged[routes.devices[0]]
            route = routes.at(step.num_tokens, len(step.last_rows))
            sent.clear()
            for stage, name in enumerate(routes.devices):
                part = StageMicroBatch(route, stage, number, channel, CPU, learns=False)
                part.forward(interceptor, models[name].call(paged[name], CPU))
            padded = step.num_tokens
            expected: Counter[Any] = Counter()
            for stage in range(1, num_stages):
                expected[stage - 1, stage, (1, padded, hidden)] += 1
                if has_layers(placement, stage):
                    expected[0, stage, (1, padded, head)] += 2  # cosines and sines
            assert sent == expected


@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b"])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_step_of_training(sent: Counter[Any], num_stages: int, schedule: str) -> None:
    model = families.build("llama")
    ids = families.inputs(model)["input_ids"]
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    placement = placement_of(model, batch, num_stages)
    hidden, head = model.config.hidden_size, model.config.head_dim
    learn_in_stages(model, placement, [batch] * 3, schedule)
    expected: Counter[Any] = Counter()
    for stage in range(1, num_stages):
        # Three micro-batches: each hidden state goes on, and its gradient comes back.
        expected[stage - 1, stage, (*ids.shape, hidden)] = 3
        expected[stage, stage - 1, (*ids.shape, hidden)] = 3
        if has_layers(placement, stage):
            expected[0, stage, (1, ids.shape[1], head)] = 6
    assert sent == expected

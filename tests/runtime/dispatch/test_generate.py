"""`generate` with inputs on the CPU answers as on one device, however it searches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoka import virtual
from duoka.planner.placement import Placement
from duoka.runtime.dispatch.dispatch import dispatch

from .test_dispatch import GLM, T5, glm, t5, tokens

ONE = Placement(entries=(("", "vgpu:1"),))


@pytest.fixture(autouse=True)
def _three_gpus() -> None:
    virtual.set_gpus([None, None, None])


class HostBias:
    """A logits processor that keeps its numbers in the host's memory."""

    def __init__(self) -> None:
        self.bias = torch.linspace(0, 1, 97)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.bias


def draft(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """A model that guesses: an untrained copy, on some device."""
    torch.manual_seed(1)
    made = type(model)(copy.deepcopy(model.config)).eval()
    return dispatch(made, Placement(entries=(("", device),)))


Options = Callable[[PreTrainedModel], dict[str, Any]]
SEARCHES: dict[str, Options] = {
    "greedy": lambda model: {},
    "prompt-lookup": lambda model: {"prompt_lookup_num_tokens": 3},
    "assisted-host": lambda model: {"assistant_model": draft(model, "cpu")},
    "assisted-first": lambda model: {"assistant_model": draft(model, "vgpu:0")},
    "assisted-last": lambda model: {"assistant_model": draft(model, "vgpu:2")},
    "beams": lambda model: {"num_beams": 3},
    "processor": lambda model: {"logits_processor": [HostBias()]},
    "assisted-processor": lambda model: {
        "prompt_lookup_num_tokens": 2,
        "logits_processor": [HostBias()],
    },
    "static": lambda model: {"cache_implementation": "static"},
}


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("make", [glm, t5])
def test_inputs_on_the_host(make: Callable[[], PreTrainedModel], search: str) -> None:
    options = {"max_new_tokens": 6, "do_sample": False}
    one, spread, alone = make(), make(), make()
    dispatch(spread, GLM if make is glm else T5)
    dispatch(alone, ONE)
    ids = tokens(batch=1).cpu().repeat(1, 2)
    expected = one.generate(ids, **options, **SEARCHES[search](one))
    for model in (spread, alone):
        found = model.generate(ids, **options, **SEARCHES[search](model))
        assert found.device.type == "cpu"
        assert found.tolist() == expected.tolist()
        assert model.device.type == "vgpu", "afterwards the model is where it was"

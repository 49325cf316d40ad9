"""Experts that the GPU fetches and keeps: equal results, and only missing experts are fetched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models.quantization.test_host_experts import (
    CLASSES,
    EXPERTS,
    TOLERANCES,
    TOP_K,
    inputs,
    make_hosted,
    make_layers,
    quantize,
)

from duoka import virtual
from duoka.models.quantization.expert_cache import COUNTS, num_slots
from duoka.models.quantization.stacked import FetchedStack

SLOTS = 2 * TOP_K


@pytest.fixture(autouse=True)
def _gpus() -> None:
    virtual.set_gpus([None])


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("scheme", TOLERANCES)
def test_results_are_those_of_experts_on_the_gpu(family: str, scheme: str) -> None:
    hosted = make_hosted(family, scheme, "vgpu:0", SLOTS)[0]
    usual = quantize(make_layers(family, "vgpu:0")[0], scheme)
    # One token, two that fill the cache, and more than it holds.
    for tokens in (1, 2, 1, 5, 2):
        hidden, index, weights = inputs(tokens, "vgpu:0")
        with torch.no_grad():
            result, expected = hosted(hidden, index, weights), usual(hidden, index, weights)
        error = (result.float() - expected.float()).norm() / expected.float().norm()
        assert error.item() < TOLERANCES[scheme]


def route(*experts: int) -> tuple[Any, ...]:
    hidden, _, weights = inputs(1, "vgpu:0")
    return hidden, torch.tensor([experts]).to("vgpu:0"), weights


def test_only_missing_experts_are_fetched_in_place_of_the_oldest() -> None:
    layer = make_hosted("qwen3_moe", "int4", "vgpu:0", 4)[0]
    assert num_slots(layer) == 4
    counted = []
    with torch.no_grad():
        # [0, 1, 2], [1, 2, 3], [0, 1, 3]; 4 is put in the place of 2, then 2 in that of 0.
        for chosen in ((0, 1, 2), (1, 2, 3), (0, 1, 3), (1, 3, 4), (1, 2, 4)):
            before = COUNTS["misses"]
            layer(*route(*chosen))
            counted.append(COUNTS["misses"] - before)
    assert counted == [3, 1, 0, 1, 1]


def test_the_host_has_the_layout_of_the_gpu() -> None:
    layer = make_hosted("qwen3_moe", "int4", "vgpu:0", SLOTS)[0]
    weight = layer.down_proj
    assert isinstance(weight.data, FetchedStack)
    assert weight.packed.device.type == "cpu"
    assert layer.cached_down_proj.packed.device.type == "vgpu"
    assert len(layer.cached_down_proj.packed) == SLOTS < EXPERTS
    assert weight.packed.shape[1:] == layer.cached_down_proj.packed.shape[1:]

"""Offloading on CUDA: pinned memory, copies beside the computation, and what the driver refuses."""

from __future__ import annotations

import copy
import mmap

import pytest
import torch
from cuda_rig.values import values
from transformers import GlmConfig, GlmForCausalLM

from duoka.planner.placement import Placement
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.runtime.dispatch.offload import Pinned

pytestmark = pytest.mark.cuda_rig(gpus="1GiB,1GiB", lag=20)

LAYERS = 6
STREAMED = tuple(f"model.layers.{index}" for index in range(1, LAYERS))
IDS = torch.tensor([[5, 6, 7, 8, 9]])


def glm() -> GlmForCausalLM:
    torch.manual_seed(0)
    config = GlmConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
    )
    return GlmForCausalLM(config).eval()


def on(*devices: str) -> Placement:
    last = devices[-1]
    front = [("model.embed_tokens", devices[0]), ("model.rotary_emb", devices[0])]
    half = LAYERS // len(devices)
    layers = [(f"model.layers.{index}", devices[index // half]) for index in range(LAYERS)]
    return Placement(entries=(*front, *layers, ("model.norm", last), ("lm_head", last)))


@pytest.mark.parametrize("devices", [("cuda:0",), ("cuda:0", "cuda:1")])
@torch.no_grad()
def test_it_computes_what_the_cpu_does(devices: tuple[str, ...]) -> None:
    expected = (model := glm())(IDS).logits
    with values(most=None):
        spread = dispatch(model, on(*devices), offloaded=STREAMED)
        found = spread(IDS.to("cuda:0")).logits
    assert spread.model.layers[2].mlp.down_proj.weight.is_pinned()
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_a_copy_of_it_pins_what_is_its_own() -> None:
    first = dispatch(glm(), on("cuda:0"), offloaded=STREAMED)
    second = copy.deepcopy(first)
    with torch.no_grad():
        second(IDS.to("cuda:0"))
    torch.ones(1, device="cuda:0")


def on_one_page(*ranges: tuple[int, int]) -> list[torch.Tensor]:
    """Tensors of their own in ranges of one piece of the host's memory, which begins a page."""
    memory = mmap.mmap(-1, 16 * mmap.PAGESIZE)
    return [
        torch.frombuffer(memoryview(memory)[slice(*part)], dtype=torch.uint8) for part in ranges
    ]


def test_a_refusal_of_the_driver_stops_nothing() -> None:
    torch.cuda.init()
    others, first, second = on_one_page((0, 100), (100, 3 * 4096), (8 * 4096, 9 * 4096))
    assert int(torch.cuda.cudart().cudaHostRegister(others.data_ptr(), 100, 1)) == 0
    pinned = Pinned(torch.device("cuda:0"), [first, second])
    assert torch.zeros(2, device="cuda:0").tolist() == [0, 0]
    assert second.is_pinned()
    pinned.release()
    assert not second.is_pinned()
    assert others.is_pinned()


def test_neighbours_on_a_page_are_pinned_together() -> None:
    parts = on_one_page((0, 100), (100, 9000), (9000, 3 * 4096))
    pinned = Pinned(torch.device("cuda:0"), parts)
    assert all(part.is_pinned() for part in parts)
    assert torch.zeros(2, device="cuda:0").tolist() == [0, 0]
    pinned.release()


def test_meta_tensors_are_not_pinned() -> None:
    Pinned(torch.device("cuda:0"), [torch.ones(1024, device="meta")])
    assert torch.zeros(2, device="cuda:0").tolist() == [0, 0]
    dispatch(glm().to("meta"), on("cuda:0"), empty=True, offloaded=STREAMED)
    assert torch.zeros(2, device="cuda:0").tolist() == [0, 0]

"""Weights that stay on the host: the same numbers, the same model, and less memory on the GPU."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from closeness import close
from torch import Tensor, nn
from transformers import GlmForCausalLM

from duoka import virtual
from duoka.errors import ModelError, PlacementError, UsageError
from duoka.planner.placement import Placement
from duoka.runtime.dispatch.dispatch import dispatch, undispatch
from duoka.runtime.dispatch.place_tensors import tensor_names

from .test_dispatch import glm as small_glm

NUM_LAYERS = 6
LAYERS = tuple(f"model.layers.{index}" for index in range(1, NUM_LAYERS))
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


@pytest.fixture(autouse=True)
def _three_gpus() -> None:
    virtual.set_gpus([None, None, None])


def glm(*, tied: bool = False) -> GlmForCausalLM:
    return small_glm(
        hidden_size=64, intermediate_size=96, num_hidden_layers=NUM_LAYERS, head_dim=16,
        tie_word_embeddings=tied,
    )  # fmt: skip


def on(*devices: str) -> Placement:
    """Layers in two halves, with the rest at the ends; one device or two."""
    first, last = devices[0], devices[-1]
    layers = [
        (f"model.layers.{index}", first if index < NUM_LAYERS // 2 else last)
        for index in range(NUM_LAYERS)
    ]
    ends = [("model.norm", last), ("lm_head", last)]
    front = [("model.embed_tokens", first), ("model.rotary_emb", first)]
    return Placement(entries=(*front, *layers, *ends))


def offloaded(
    *devices: str, names: tuple[str, ...] = LAYERS, model: GlmForCausalLM | None = None
) -> GlmForCausalLM:
    return dispatch(
        glm() if model is None else model, on(*(devices or ("vgpu:0",))), offloaded=names
    )


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model(IDS.to("vgpu:0")).logits
    return found.cpu()


@pytest.mark.parametrize("devices", [("vgpu:0",), ("vgpu:0", "vgpu:1")])
@pytest.mark.parametrize(
    "names", [LAYERS, LAYERS[:1], LAYERS[2:4], (*LAYERS, "model.norm", "lm_head")]
)
def test_logits_are_those_of_the_model_that_is_not_offloaded(
    devices: tuple[str, ...], names: tuple[str, ...]
) -> None:
    expected = logits(dispatch(glm(), on(*devices)))
    model = offloaded(*devices, names=names)
    for _ in range(2):
        assert close(logits(model), expected)


def test_generation_is_the_same_token_by_token() -> None:
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "use_cache": True}
    plain: Any = glm()
    model: Any = offloaded("vgpu:0", "vgpu:1")
    with torch.inference_mode():
        expected = plain.generate(IDS, **options)
        found = model.generate(IDS.to("vgpu:0"), **options)
    assert torch.equal(found.cpu(), expected)


def test_only_two_buffers_are_on_the_gpu() -> None:
    layer = sum(-(-p.nbytes // 512) * 512 for p in glm().model.layers[0].parameters())
    with virtual.gpus([None, None, None]) as world:
        resident = dispatch(glm(), on("vgpu:0"))
        whole = world.memory_allocated(0)
        del resident
    with virtual.gpus([None, None, None]) as world:
        model = offloaded()
        assert world.memory_allocated(0) == whole - (len(LAYERS) - 2) * layer
        before = world.memory_allocated(0)
        logits(model)
        assert world.memory_allocated(0) == before


def test_the_model_stays_an_ordinary_one() -> None:
    plain, model = glm(), offloaded()
    assert [*model.state_dict()] == [*plain.state_dict()]
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), plain.state_dict()[name])
        assert (value.device.type == "cpu") == name.startswith(tuple(f"{m}." for m in LAYERS))
    assert type(model.model.layers[1]).__name__ == "GlmDecoderLayer"


def test_hooks_see_the_weights_on_the_gpu() -> None:
    model, seen = offloaded(), []
    layer = model.model.layers[2]
    layer.register_forward_pre_hook(lambda m, _: seen.append(m.mlp.down_proj.weight.device.type))
    layer.register_forward_hook(lambda m, *_: seen.append(m.mlp.down_proj.weight.device.type))
    logits(model)
    assert seen == ["vgpu", "vgpu"]
    assert layer.mlp.down_proj.weight.device.type == "cpu"


def test_changed_weights_are_copied_again() -> None:
    model, other = offloaded(), glm()
    logits(model)
    with torch.no_grad():
        for changed in (model, other):
            changed.model.layers[1].mlp.down_proj.weight.mul_(2)
            changed.model.layers[5].mlp.down_proj.weight.zero_()
    assert close(logits(model), logits(dispatch(other, on("vgpu:0"))))


def test_an_error_leaves_the_weights_on_the_host() -> None:
    model = offloaded()
    expected = logits(model)

    def fail(*_: object) -> None:
        raise ValueError("in the middle")

    handle = model.model.layers[3].mlp.register_forward_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        logits(model)
    handle.remove()
    for name, tensor in tensor_names(model):
        assert (tensor.device.type == "cpu") == name.startswith(tuple(f"{m}." for m in LAYERS))
    assert close(logits(model), expected)


def test_training_is_refused_and_never_ignored() -> None:
    model = offloaded().train()
    with pytest.raises(UsageError, match="can't be trained"):
        model(IDS.to("vgpu:0"), labels=IDS.to("vgpu:0"))
    loss = model.eval()(IDS.to("vgpu:0"), labels=IDS.to("vgpu:0")).loss
    with pytest.raises(UsageError, match="can't be trained"):
        loss.backward()


def test_two_threads_take_turns() -> None:
    model, found = offloaded(), []
    expected = logits(model)
    threads = [threading.Thread(target=lambda: found.append(logits(model))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert all(close(each, expected) for each in found)


def test_a_copy_streams_for_itself() -> None:
    model = offloaded()
    expected = logits(model)
    twin = copy.deepcopy(model)
    undispatch(model)
    assert close(logits(twin), expected)
    assert type(model.model.layers[2]) is type(glm().model.layers[2])


class _Counting(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        scaled: Tensor = self.linear(x) * self.calls
        return scaled


def test_what_a_call_writes_into_a_buffer_is_kept() -> None:
    model = nn.Sequential(*[_Counting() for _ in range(4)]).eval()
    twin = copy.deepcopy(model)
    entries = tuple((str(index), "vgpu:0") for index in range(4))
    dispatch(model, Placement(entries=entries), offloaded=["1", "2", "3"])
    with torch.no_grad():
        for _ in range(3):
            assert close(model(torch.ones(1, 4, device="vgpu:0")), twin(torch.ones(1, 4)))
    assert [int(count) for count in model.buffers()] == [3, 3, 3, 3]


def test_tied_weights_are_refused() -> None:
    with pytest.raises(PlacementError, match="modules share weights with other modules"):
        offloaded(names=("lm_head",), model=glm(tied=True))


class _Nested(nn.Module):
    """Calls a module that isn't its own."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.others = [other]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.others[0](self.linear(x))
        return found


def test_a_streamed_module_that_calls_another_one_is_refused() -> None:
    last = nn.Linear(4, 4)
    model = nn.Sequential(_Nested(last), nn.Linear(4, 4), last).eval()
    entries = tuple((str(index), "vgpu:0") for index in range(3))
    dispatch(model, Placement(entries=entries), offloaded=["0", "1", "2"])
    with torch.no_grad(), pytest.raises(ModelError, match="calls another one"):
        model(torch.ones(1, 4, device="vgpu:0"))

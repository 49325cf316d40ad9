"""What a spread model does besides what its class does: outputs come back, and it stays put."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import tiny
import torch
from closeness import close
from torch import nn

from duoka import Placement, models, virtual
from duoka.errors import PlacementError
from duoka.runtime.dispatch.dispatch import dispatch, undispatch
from duoka.runtime.dispatch.place_tensors import tensor_names

CONFIG = {**tiny.CONFIGS["llama"], "hidden_size": 32, "intermediate_size": 48, "vocab_size": 64}
PLACEMENT = Placement(entries=(("", "vgpu:0"), ("model.layers.3", "vgpu:1"), ("lm_head", "vgpu:1")))
IDS = torch.tensor([[5, 7, 9], [11, 2, 3]])


@pytest.fixture(autouse=True)
def _two_gpus() -> None:
    virtual.set_gpus([None, None])


def llama() -> Any:
    torch.manual_seed(0)
    model = models.build(CONFIG).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model.eval()


def spread() -> Any:
    return dispatch(llama(), PLACEMENT)


def test_outputs_come_back_however_forward_is_called() -> None:
    many = spread()
    expected = many(IDS.to("vgpu:0")).logits
    plain = many.forward
    assert inspect.signature(plain) == inspect.signature(llama().forward)
    direct = plain(IDS.to("vgpu:0")).logits
    many.forward = lambda *args, **kwargs: plain(*args, **kwargs)
    wrapped = many(IDS.to("vgpu:0")).logits
    for logits in (direct, wrapped):
        assert str(logits.device) == "vgpu:0"
        assert close(logits, expected)
    model = llama()
    plain = model.forward
    model.forward = lambda *args, **kwargs: plain(*args, **kwargs)
    assert str(dispatch(model, PLACEMENT)(IDS.to("vgpu:0")).logits.device) == "vgpu:0"


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to("vgpu:0"),
        lambda model: model.to(torch.device("cpu"), torch.float16),
        lambda model: model.cpu(),
        lambda model: nn.Sequential(nn.Linear(2, 2), model).to("vgpu:1"),
        lambda model: model.model.to("vgpu:0"),
        lambda model: model.model.layers[3].to("vgpu:0"),
        lambda model: model.lm_head.cpu(),
    ],
    ids=["to", "to-dtype", "cpu", "within", "body", "layer", "head"],
)
def test_a_spread_model_is_not_moved(move: Any) -> None:
    model = spread()
    before = {name: (t.device, t.dtype) for name, t in tensor_names(model)}
    with pytest.raises(PlacementError, match="dispatched to several devices") as refused:
        move(model)
    assert "duoka.dispatch(model, {" in (refused.value.hint or "")
    assert {name: (t.device, t.dtype) for name, t in tensor_names(model)} == before


def test_a_spread_model_changes_its_type_and_then_its_place() -> None:
    model = spread().half()
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert str(model.lm_head.weight.device) == "vgpu:1"
    undispatch(model)
    assert str(model.to("vgpu:1").lm_head.weight.device) == "vgpu:1"

"""Stacked adapters: in any company, each token gets what the merged model computes for it."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from duoka.errors import LoadError, ModelError
from duoka.models.adapter_stacks import add_stacks, fill_stacks, ranks_of
from duoka.models.lora import LoraAdapter, LowRank, merge_adapter


class Layer(nn.Module):
    """A layer with a linear module of each kind, and one that gets a part of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(4, 6)
        self.narrow = Conv1D(4, 6)
        self.last = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, scale: float = 1.0, **kwargs: Any) -> Tensor:
        hidden = scale * self.narrow(torch.tanh(self.wide(hidden)))
        return torch.cat((hidden[:, :-1], self.last(hidden[:, -1:])), 1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(4, 8)

    def forward(self, tokens: Tensor, **kwargs: Any) -> Tensor:
        hidden = self.words(tokens)
        for layer in self.layers:
            hidden = layer(hidden, scale=2.0, **kwargs)
        return self.head(hidden)  # type: ignore[no-any-return]


def low_rank(inputs: int, outputs: int, rank: int) -> LowRank:
    return LowRank(down=torch.randn(rank, inputs), up=torch.randn(outputs, rank), scaling=1.5)


def adapter(*names: str, rank: int = 2) -> LoraAdapter:
    sizes = {"wide": (4, 6), "narrow": (6, 4), "last": (4, 4), "head": (4, 8)}
    return LoraAdapter(layers={n: low_rank(*sizes[n.rpartition(".")[2]], rank) for n in names})


def step_of(model: nn.Module, adapters: list[int]) -> dict[str, Any]:
    """Arguments of a step, as the engine's: the table has the adapter of each token."""

    def foreign_ranks(table: Tensor) -> Tensor:
        return table[:, None] != torch.tensor(ranks_of(model).owners)

    step = SimpleNamespace(foreign_ranks=foreign_ranks)
    return {"step": step, "step_table": torch.tensor(adapters)}


WIDE, NARROW = "layers.0.wide", "layers.1.narrow"


@pytest.fixture
def adapters() -> dict[str, LoraAdapter]:
    torch.manual_seed(1)
    ranks = {**adapter(WIDE).layers, **adapter(NARROW, rank=3).layers}
    return {"a": adapter(WIDE), "b": LoraAdapter(layers=ranks), "c": adapter(WIDE, NARROW, rank=1)}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def stacked(model: nn.Module, adapters: dict[str, LoraAdapter]) -> nn.Module:
    model = copy.deepcopy(model)
    add_stacks(model, adapters)
    stacks = {name: buffer for name, buffer in model.named_buffers() if "lora_" in name}
    for name, buffer in stacks.items():
        model.get_submodule(name.rpartition(".")[0]).register_buffer(
            name.rpartition(".")[2], torch.full_like(buffer, torch.nan, device="cpu"), False
        )
    fill_stacks(model, adapters)
    return model


def test_each_token_gets_its_adapter(model: nn.Module, adapters: dict[str, LoraAdapter]) -> None:
    expected = [model]
    for each in adapters.values():
        expected.append(copy.deepcopy(model))
        merge_adapter(expected[-1], each)
    both = stacked(model, adapters)
    tokens, numbers = torch.tensor([[1, 2, 3, 1, 5, 1]]), [1, 0, 3, 2, 2, 0]
    with torch.no_grad():
        result = both(tokens, **step_of(both, numbers))[0]
        wanted = torch.stack([expected[n](tokens)[0, at] for at, n in enumerate(numbers)])
        assert torch.allclose(result, wanted, atol=1e-5)
        assert not torch.allclose(result[:-1], model(tokens)[0, :-1], atol=1e-2)
        # Outside of a step, and for tokens without an adapter, nothing is added.
        assert torch.equal(both(tokens), model(tokens))
        assert torch.equal(both(tokens, **step_of(both, [0] * 6)), model(tokens))


def test_a_number_without_end_stays_in_its_request(model: nn.Module) -> None:
    """What another adapter makes of a token is not multiplied by zero: that would be NaN."""
    good, bad = adapter(WIDE), adapter(WIDE)
    bad.layers[WIDE].down.fill_(torch.inf)
    both = stacked(model, {"good": good, "bad": bad})
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        result = both(tokens, **step_of(both, [1, 2, 0]))[0]
    assert result.isfinite().all(1).tolist() == [True, False, True]


def test_stacks_have_the_ranks_of_their_module(
    model: nn.Module, adapters: dict[str, LoraAdapter]
) -> None:
    before = list(model.state_dict())
    add_stacks(model, adapters)
    assert ranks_of(model).owners == [1, 1, 2, 2, 2, 3]
    shapes = {n: tuple(b.shape) for n, b in model.named_buffers() if "lora_" in n}
    assert shapes == {
        f"{WIDE}.lora_down": (6, 4),
        f"{WIDE}.lora_up": (6, 6),
        f"{NARROW}.lora_down": (4, 6),  # without the ranks of adapter 1
        f"{NARROW}.lora_up": (4, 4),
    }
    assert list(model.state_dict()) == before
    assert all(buffer.is_meta for _, buffer in model.named_buffers())
    layer = model.get_submodule("layers.0")
    assert isinstance(layer, Layer)
    assert type(layer).__name__ == "Layer"
    assert "scale" in inspect.signature(layer.forward).parameters
    assert type(model.get_submodule("layers.1.wide")) is nn.Linear


class Launches(TorchDispatchMode):
    """Counts operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        views = ("view", "slice", "transpose", "unsqueeze", "alias", "detach", "t", "expand")
        if (name := func.overloadpacket.__name__) not in views:
            self.names.append(name)
        return result


def test_launches_are_three_for_a_module_and_one_for_a_layer(
    model: nn.Module, adapters: dict[str, LoraAdapter]
) -> None:
    both = stacked(model, adapters)
    tokens, step = torch.tensor([[1, 2, 3]]), step_of(both, [1, 0, 3])
    owners = torch.tensor(ranks_of(both).owners)
    step["step"] = SimpleNamespace(foreign_ranks=lambda table: torch.ne(table[:, None], owners))
    counts = []
    with torch.no_grad():
        for call in (lambda: model(tokens), lambda: both(tokens), lambda: both(tokens, **step)):
            with Launches() as launches:
                call()
            counts.append(launches.names)
    assert counts[0] == counts[1]
    added = sorted(counts[2])
    for name in counts[0]:
        added.remove(name)
    assert added == sorted(["ne"] * 2 + ["mm", "masked_fill_", "addmm_"] * 2)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"layers.0.wide": (5, 6)}, "adapter 'x' doesn't match this model: it goes from 5 to 6"),
        ({"layers.7.wide": (4, 6)}, "adapter 'x' doesn't match this model: no module called"),
        ({"head": (4, 8)}, "adapter 'x' changes head, and requests can choose only"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    model: nn.Module, layers: dict[str, tuple[int, int]], message: str
) -> None:
    wrong = LoraAdapter(layers={name: low_rank(*sizes, 2) for name, sizes in layers.items()})
    with pytest.raises(LoadError, match=message):
        add_stacks(model, {"good": adapter(WIDE), "x": wrong})
    embedding = LowRank(
        down=torch.randn(2, 8), up=torch.randn(4, 2), scaling=1.0, is_embedding=True
    )
    with pytest.raises(LoadError, match="changes words, and requests"):
        add_stacks(model, {"x": LoraAdapter(layers={"words": embedding})})


def test_a_module_that_gets_some_tokens_alone_is_refused(model: nn.Module) -> None:
    both = stacked(model, {"x": adapter("layers.0.last")})
    with torch.no_grad(), pytest.raises(ModelError, match="gets 1 rows of a step of 3 tokens"):
        both(torch.tensor([[1, 2, 3]]), **step_of(both, [1, 0, 1]))


def test_a_module_that_is_not_called_is_refused(model: nn.Module) -> None:
    both = stacked(model, {"x": adapter(WIDE, NARROW)})
    wide: Any = both.get_submodule(WIDE)
    with torch.no_grad():
        both.get_submodule("layers.0")(torch.randn(1, 2, 4), **step_of(both, [1, 0]))
    with pytest.raises(ModelError, match=f"changes {NARROW}, which isn't called"):
        ranks_of(both).refuse_uncalled()
    with torch.no_grad():
        both(torch.tensor([[1, 2]]), **step_of(both, [1, 0]))
    ranks_of(both).refuse_uncalled()
    assert wide.lora_down.shape == (2, 4)

"""Blocks by experiment, on models whose names and orders give nothing away."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from duoka import models, virtual
from duoka.planner.placement import Placement
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.dispatch import dispatch
from duoka.runtime.dispatch.place_tensors import place
from duoka.tracing.blocks import ModuleGroup, find_groups

WIDTH = 16


def groups_of(model: nn.Module, *inputs: Tensor) -> list[ModuleGroup]:
    with virtual.gpus([None], data="meta"), torch.no_grad():
        place(model, Placement(entries=(("", "vgpu:0"),)))
        moved = [tensor.to("vgpu:0") for tensor in inputs]
        return find_groups(model, lambda: model(*moved))


def names(model: nn.Module, *inputs: Tensor) -> list[tuple[str, ...]]:
    groups = groups_of(model, *inputs)
    assert_complete(model, groups)
    return [group.names for group in groups]


def assert_complete(model: nn.Module, groups: list[ModuleGroup]) -> None:
    """Every parameter and buffer lies under exactly one name."""
    entries = [name for group in groups for name in group.names]
    for tensor, _ in (*model.named_parameters(), *model.named_buffers()):
        holders = [e for e in entries if e in ("", tensor) or tensor.startswith(f"{e}.")]
        assert len(holders) == 1, (tensor, holders)


def floats() -> Tensor:
    return torch.zeros(3, WIDTH)


def tokens() -> Tensor:
    return torch.zeros(1, 5, dtype=torch.long)


class Inner(nn.Module):
    """A residual: what comes in meets what the weights make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.widen(self.scale(x)).relu())


class Backwards(nn.Module):
    """Registered in the reverse of the order of execution, and called nothing usual."""

    def __init__(self) -> None:
        super().__init__()
        self.zeta = nn.Linear(WIDTH, 4)
        self.stack = nn.ModuleDict({"b": Inner(), "a": Inner()})
        self.alpha = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.alpha(x)
        x = self.stack["a"](x)
        x = self.stack["b"](x)
        return self.zeta(x)


def test_blocks_come_in_the_order_of_execution() -> None:
    assert names(Backwards(), floats()) == [("alpha",), ("stack.a",), ("stack.b",), ("zeta",)]


class Across(nn.Module):
    """A residual around parts that are no module of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.one = nn.Linear(WIDTH, WIDTH)
        self.zero = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.zero(x)
        y = self.two(self.one(x).relu())
        return self.last(x + y)


def test_a_residual_across_modules_is_one_block() -> None:
    found = names(Across(), floats())
    assert ("last",) in found
    (whole,) = [block for block in found if "two" in block]
    # What is added comes from the module before: the sum ties all three together.
    assert set(whole) == {"zero", "one", "two"}


class Nested(nn.Module):
    """Layers within layers, a residual around the outer one."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Module()
        self.outer.forward = self._outer  # type: ignore[method-assign]
        self.outer.deep = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.after = nn.Linear(WIDTH, WIDTH)

    def _outer(self, x: Tensor) -> Tensor:
        return self.outer.deep(x) + x  # type: ignore[no-any-return, operator]

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.outer(self.before(x)))  # type: ignore[no-any-return]


def test_a_residual_around_a_nested_module_keeps_it_whole() -> None:
    assert names(Nested(), floats()) == [("before",), ("outer",), ("after",)]


def test_a_chain_falls_into_its_links() -> None:
    chain = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    assert names(chain, floats()) == [("0",), ("1",), ("2",), ("3",)]


def test_one_module_is_one_block() -> None:
    assert names(nn.Linear(WIDTH, 2), floats()) == [("",)]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, WIDTH)
        self.places = nn.Embedding(10, WIDTH)
        self.layer = Inner()
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        where = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.layer(self.words(ids) + self.places(where)))


def test_embedding_and_positions_are_one_block() -> None:
    assert names(Positions(), tokens()) == [("words", "places"), ("layer",), ("head",)]


def test_a_tied_head_is_a_block_of_its_own() -> None:
    found = groups_of(Positions(), tokens())
    assert found[-1] == ModuleGroup(names=("head",), owners=("head",), streams=True)


class Mixed(nn.Module):
    """A parameter of its own beside children that lie in other blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.gain + self.shift)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Mixed()
        self.end = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.part(x))


@pytest.mark.parametrize(("model", "prefix"), [(Mixed(), ""), (Holder(), "part.")])
def test_a_direct_parameter_is_named_by_itself(model: nn.Module, prefix: str) -> None:
    found = names(model, floats())
    (block,) = [block for block in found if f"{prefix}gain" in block]
    assert f"{prefix}shift" in block
    assert (f"{prefix}last",) in found


class Idle(nn.Module):
    """Parts that a run doesn't reach, parts with buffers only, and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Module()
        self.table.register_buffer("angles", torch.ones(WIDTH))
        self.start = nn.Linear(WIDTH, WIDTH)
        self.body = nn.ModuleList([Inner(), Inner()])
        self.body[1].adapter = nn.Linear(WIDTH, WIDTH)  # never called
        self.mask = nn.Module()
        self.mask.register_buffer("low", torch.ones(WIDTH), persistent=False)
        self.end = nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, WIDTH)  # never called
        self.nothing = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x * self.table.angles)
        for part in self.body:
            x = part(x)
        return self.end(self.nothing(x) + self.mask.low)


def test_what_does_not_run_is_placed_with_its_relatives() -> None:
    groups = groups_of(Idle(), floats())
    assert_complete(Idle(), groups)
    (layer,) = [group for group in groups if "body.1.adapter" in group.owners]
    assert "body.1" in layer.names
    assert any("spare" in group.names for group in groups)


def test_buffers_alone_are_no_block() -> None:
    model = Idle()
    groups = groups_of(model, floats())
    for group in groups:
        modules = [model.get_submodule(owner) for owner in group.owners]
        assert any(next(module.parameters(), None) is not None for module in modules), group.names


def test_the_groups_leave_no_hooks() -> None:
    model = Backwards()
    groups_of(model, floats())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


class Explodes(Backwards):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        raise RuntimeError("halfway")


def test_the_groups_leave_no_hooks_after_an_error() -> None:
    model = Explodes()
    with pytest.raises(RuntimeError, match="halfway"):
        groups_of(model, floats())
    assert not any(module._forward_hooks for module in model.modules())


class Reused(nn.Module):
    """One layer that runs twice, with another between."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = Inner()
        self.between = Inner()
        self.end = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.shared(self.between(self.shared(x))))


def test_what_runs_between_two_calls_of_a_module_stays_with_it() -> None:
    first, end = names(Reused(), floats())
    assert set(first) == {"shared", "between"}
    assert end == ("end",)


class Experts(nn.Module):
    """Two ways that are added: neither can go without the other."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = functional.softmax(self.gate(x), -1)
        return weight[:, :1] * self.left(x) + weight[:, 1:] * self.right(x)


def test_ways_that_meet_are_one_block() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, 2))
    assert names(model, floats()) == [("0",), ("1",), ("2",)]


class Program(nn.Module):
    """Any wiring: each part reads one earlier value, and may add another one to its result."""

    def __init__(self, parts: list[nn.Module], reads: list[int], added: list[int | None]) -> None:
        super().__init__()
        self.order = [str(index) for index in range(len(parts))]
        self.parts = nn.ModuleDict(dict(reversed(list(zip(self.order, parts, strict=True)))))
        self.reads, self.added = reads, added
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for name, read, added in zip(self.order, self.reads, self.added, strict=True):
            value = self.parts[name](values[read])
            values.append(value if added is None else value + values[added])
        return values[-1] * self.gain


@st.composite
def programs(draw: st.DrawFn, depth: int = 2) -> nn.Module:
    parts = st.builds(lambda: nn.Linear(WIDTH, WIDTH))
    parts = st.one_of(parts, programs(depth - 1)) if depth > 1 else parts
    count = draw(st.integers(2, 5))
    return Program(
        [draw(parts) for _ in range(count)],
        [draw(st.integers(max(0, index - 2), index)) for index in range(count)],
        [draw(st.none() | st.none() | st.integers(0, index)) for index in range(count)],
    )


@settings(max_examples=examples(40))
@given(model=programs())
def test_a_cut_between_any_two_blocks_works(model: nn.Module) -> None:
    x = torch.randn(3, WIDTH)
    with torch.no_grad():
        expected = model(x)
    groups = groups_of(copy.deepcopy(model).to("meta"), x)
    assert_complete(model, groups)
    for cut in range(1, len(groups)):
        entries = tuple(
            (name, f"vgpu:{int(index >= cut)}")
            for index, group in enumerate(groups)
            for name in group.names
        )
        with virtual.gpus([None, None]), torch.no_grad():
            spread = dispatch(copy.deepcopy(model), Placement(entries=entries))
            assert torch.allclose(spread(x.to("vgpu:0")).cpu(), expected, atol=1e-5)


class Spliced(nn.Module):
    """Words first, then what is added to them: moved to where they are, or not."""

    def __init__(self, *, moves: bool) -> None:
        super().__init__()
        self.moves = moves
        self.words = nn.Embedding(10, WIDTH)
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), Inner())
        self.layer = Inner()

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        seen = self.tower(torch.zeros(1, ids.shape[1], WIDTH, device=ids.device))
        if self.moves:
            seen = seen.to(words.device)
        return self.layer(words + seen)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("hears", [False, True])
def test_a_block_ends_where_model_code_moves_what_it_made(moves: bool, hears: bool) -> None:
    model = Spliced(moves=moves)
    with virtual.gpus([None], data="meta"), torch.no_grad():
        place(model, Placement(entries=(("", "vgpu:0"),)))
        ids = tokens().to("vgpu:0")
        groups = find_groups(model, lambda: model(ids), hears_moves=hears)
    assert_complete(model, groups)
    if moves and hears:
        found = [group.names for group in groups]
        assert found == [("words",), ("tower.0",), ("tower.1",), (), ("layer",)]
        assert [group.returns_to for group in groups] == [None, None, None, 0, None]
    else:
        assert [group.names for group in groups] == [("words", "tower"), ("layer",)]


class Masked(nn.Module):
    """Makes something where its words lie, when the norm behind them has run."""

    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        hidden = self.norm(words)
        if self.how == "named":
            mask = torch.ones(words.shape[1], 1, device=words.device)
        elif self.how == "computed":
            mask = words.mean(dim=-1, keepdim=True)
        elif self.how == "seen":
            mask = words[..., :1]
        else:
            mask = torch.ones(words.shape[1], 1, device=hidden.device)
        return self.layer(hidden) + self.layer(mask.expand_as(hidden))


@pytest.mark.parametrize("how", ["named", "computed", "seen", "behind"])
def test_what_is_made_on_an_earlier_device_keeps_blocks_together(how: str) -> None:
    """On two GPUs it would lie with the words, in the turn of the norm."""
    together = [("words", "norm"), ("layer",)]
    apart = [("words",), ("norm",), ("layer",)]
    made = how in ("named", "computed")
    assert names(Masked(how=how), tokens()) == (together if made else apart)


@pytest.mark.parametrize(("how", "number"), [("named", 2), ("computed", 3)])
def test_where_moves_are_heard_features_may_be_put_together_later(how: str, number: int) -> None:
    model = Masked(how=how)
    with virtual.gpus([None], data="meta"), torch.no_grad():
        place(model, Placement(entries=(("", "vgpu:0"),)))
        ids = tokens().to("vgpu:0")
        assert (
            len(find_groups(model, lambda: model(ids), hears_moves=True, fuses_glue=False))
            == number
        )


# Models of transformers, without any of their lists of class names.

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LAYERED = {
    "llama": {**SIZES, "model_type": "llama"},
    "tied": {**SIZES, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
    "experts": {**SIZES, "model_type": "mixtral", "num_local_experts": 2},
    "norms on both sides": {**SIZES, "model_type": "gemma2", "head_dim": 8},
    "glm": {**SIZES, "model_type": "glm", "head_dim": 8, "pad_token_id": 0},
}


def groups_of_language_model(model: PreTrainedModel) -> list[ModuleGroup]:
    with virtual.gpus([None], data="meta"), torch.no_grad():
        place(model, Placement(entries=(("", "vgpu:0"),)))
        device = torch.device("vgpu:0")
        return find_groups(model, lambda: Stepper(model, 1, device).step(8))


@pytest.mark.parametrize("name", LAYERED)
def test_a_decoder_layer_is_one_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build(LAYERED[name], dtype=torch.bfloat16)
    monkeypatch.setattr(type(model), "_no_split_modules", [], raising=False)
    groups = groups_of_language_model(model)
    assert_complete(model, groups)
    assert [group.names for group in groups] == [
        ("model.embed_tokens", "model.rotary_emb"),
        ("model.layers.0",),
        ("model.layers.1",),
        ("model.layers.2",),
        ("model.norm",),
        ("lm_head",),
    ]


def test_parallel_attention_and_positions_of_older_models() -> None:
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    model = models.build({**config, "n_positions": 64}, dtype=torch.bfloat16)
    groups = groups_of_language_model(model)
    assert_complete(model, groups)
    assert [set(group.names) for group in groups] == [
        {"transformer.wte", "transformer.wpe"},
        {"transformer.h.0"},
        {"transformer.h.1"},
        {"transformer.ln_f"},
        {"lm_head"},
    ]


class Renewing(nn.Module):
    """Makes its buffer anew in each call, and much else: what it had leaves its identity free."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("angles", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("angles", self.weight.cos())
        return torch.stack([x * self.angles + self.weight for _ in range(20)]).sum(0)


def test_a_buffer_that_is_replaced_names_nothing_else() -> None:
    model = nn.Sequential(*[Renewing() for _ in range(6)])
    assert names(model, floats()) == [(str(index),) for index in range(6)]

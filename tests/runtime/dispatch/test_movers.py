"""Arguments move at block entries: once a stage and call, never stale, never kept too long."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from duoka.planner.placement import Placement
from duoka.runtime.dispatch.dispatch import dispatch, undispatch

# The meta device is another device than the CPU, so it shows every move; values are tested on
# virtual GPUs in test_dispatch.py.
AWAY = torch.device("meta")


class Reader(nn.Module):
    """A block that keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((args, kwargs))
        return args[0] if args else None

    @property
    def last(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.seen[-1]


class Stack(nn.Module):
    """Blocks called as `script` says."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reader() for _ in range(num_blocks))
        self.script: Callable[..., Any] = print

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.script(*args, **kwargs)


def stack(*devices: str) -> Stack:
    model = Stack(len(devices))
    entries = tuple((f"blocks.{index}", device) for index, device in enumerate(devices))
    return dispatch(model, Placement(entries=entries))


def call_all(model: Stack) -> Callable[..., None]:
    def script(*args: Any, **kwargs: Any) -> None:
        for block in model.blocks:
            block(*args, **kwargs)

    return script


def test_arguments_arrive_on_the_device_of_the_block() -> None:
    model = stack("cpu", "meta")
    model.script = call_all(model)
    model(torch.ones(2), mask=torch.ones(2), ids=torch.ones(2, dtype=torch.long))
    (hidden,), kwargs = model.blocks[1].last
    assert {t.device.type for t in (hidden, *kwargs.values())} == {"meta"}
    (hidden,), kwargs = model.blocks[0].last
    assert {t.device.type for t in (hidden, *kwargs.values())} == {"cpu"}


def test_other_objects_pass_untouched() -> None:
    class Cache:
        keys = torch.ones(1)

    model, cache, text = stack("cpu", "meta"), Cache(), ["a", {"b": 1}]
    model.script = call_all(model)
    model(cache, text)
    (arrived, arrived_text), _ = model.blocks[1].last
    assert arrived is cache
    assert arrived_text is text
    assert cache.keys.device.type == "cpu"


def test_a_tensor_moves_once_a_stage_and_call() -> None:
    model = stack("cpu", "meta", "meta")
    model.script = call_all(model)
    mask = torch.ones(2)
    model(mask, again=mask)
    (first,), kwargs = model.blocks[1].last
    assert kwargs["again"] is first
    assert model.blocks[2].last[0][0] is first
    model(mask)
    assert model.blocks[2].last[0][0] is not first


def test_a_tensor_changed_in_place_moves_again() -> None:
    model, mask = stack("cpu", "meta", "meta"), torch.ones(2)

    def script() -> None:
        model.blocks[1](mask)
        mask.add_(1)
        model.blocks[2](mask)

    model.script = script
    model()
    assert model.blocks[1].last[0][0] is not model.blocks[2].last[0][0]


def test_inference_tensors_move_each_time() -> None:
    model = stack("cpu", "meta", "meta")
    model.script = call_all(model)
    with torch.inference_mode():
        model(torch.ones(2))
    assert model.blocks[1].last[0][0] is not model.blocks[2].last[0][0]


def test_a_copy_made_in_inference_mode_is_not_used_outside() -> None:
    model, mask = stack("cpu", "meta", "meta"), torch.ones(2)

    def script() -> None:
        with torch.inference_mode():
            model.blocks[1](mask)
        model.blocks[2](mask)

    model.script = script
    model()
    assert model.blocks[1].last[0][0].is_inference()
    assert not model.blocks[2].last[0][0].is_inference()


def test_a_copy_made_without_gradients_is_not_used_where_they_are_needed() -> None:
    model, state = stack("cpu", "meta", "meta"), torch.ones(2, requires_grad=True)

    def script() -> None:
        with torch.no_grad():
            model.blocks[1](state)
        model.blocks[2](state)

    model.script = script
    model()
    assert model.blocks[2].last[0][0].requires_grad


def test_what_was_moved_dies_with_its_source() -> None:
    model = stack("cpu", "meta")
    copies: list[weakref.ref[Tensor]] = []

    def script() -> None:
        hidden = torch.ones(2)
        model.blocks[1](hidden)
        copies.append(weakref.ref(model.blocks[1].seen.pop()[0][0]))
        assert copies[0]() is not None  # still remembered
        del hidden
        assert copies[0]() is None

    model.script = script
    gc.disable()
    try:
        model()
    finally:
        gc.enable()
    assert len(copies) == 1


def test_an_error_in_the_call_forgets_too() -> None:
    model, mask = stack("cpu", "meta", "meta"), torch.ones(2)

    def script() -> None:
        model.blocks[1](mask)
        raise ValueError("stop")

    model.script = script
    with pytest.raises(ValueError, match="stop"):
        model()
    copy = weakref.ref(model.blocks[1].seen.pop()[0][0])
    assert copy() is None
    model.script = call_all(model)
    model(mask)
    assert model.blocks[1].last[0][0] is model.blocks[2].last[0][0]


def test_outside_a_call_nothing_is_remembered() -> None:
    model, mask = stack("cpu", "meta", "meta"), torch.ones(2)
    model.blocks[1](mask)
    model.blocks[2](mask)
    assert model.blocks[1].last[0][0].device == AWAY
    assert model.blocks[1].last[0][0] is not model.blocks[2].last[0][0]


def test_a_call_within_the_call_remembers_for_itself() -> None:
    model, mask = stack("cpu", "meta", "meta"), torch.ones(2)
    inner: list[Tensor] = []

    def outer() -> None:
        model.blocks[1](mask)
        model.script = lambda: inner.append(model.blocks[1](mask))
        model()
        model.blocks[2](mask)

    model.script = outer
    model()
    first, last = model.blocks[1].seen[0][0][0], model.blocks[2].last[0][0]
    assert first is last
    assert inner[0] is not first


class Wrapper(nn.Module):
    """A model whose head calls the body, as transformers' do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Stack(3)
        self.head = Reader()

    def forward(self, mask: Tensor) -> None:
        self.body(mask)
        self.head(mask)


WRAPPED = Placement(
    entries=(
        ("body.blocks.0", "cpu"),
        ("body.blocks.1", "meta"),
        ("body.blocks.2", "meta"),
        ("head", "meta"),
    )
)


def test_calling_the_body_alone_is_a_call_of_its_own() -> None:
    model = dispatch(Wrapper(), WRAPPED)
    model.body.script = call_all(model.body)
    model.body(torch.ones(2))
    blocks = model.body.blocks
    assert blocks[1].last[0][0] is blocks[2].last[0][0]


def test_the_body_within_the_model_shares_its_call() -> None:
    model = dispatch(Wrapper(), WRAPPED)
    model.body.script = call_all(model.body)
    model(torch.ones(2))
    assert model.body.blocks[1].last[0][0] is model.head.last[0][0]


def test_threads_share_nothing() -> None:
    model, mask = stack("cpu", "meta", "meta"), torch.ones(2)
    here, there = threading.Event(), threading.Event()
    found: list[Tensor] = []

    def other() -> None:
        here.wait(10)
        model.blocks[2](mask)  # outside a call of this thread, within one of the other
        found.append(model.blocks[2].last[0][0])
        there.set()

    def script() -> None:
        model.blocks[1](mask)
        here.set()
        assert there.wait(10)
        model.blocks[2](mask)

    model.script = script
    thread = threading.Thread(target=other)
    thread.start()
    model()
    thread.join()
    first = model.blocks[1].last[0][0]
    assert found[0] is not first
    assert model.blocks[2].last[0][0] is first


def test_a_list_of_layers_stands_for_its_layers() -> None:
    model = Stack(2)
    dispatch(model, Placement(entries=(("", "meta"), ("blocks.0", "cpu"))))
    model.script = call_all(model)
    model(torch.ones(2))
    assert model.blocks[0].last[0][0].device.type == "cpu"
    assert model.blocks[1].last[0][0].device == AWAY


def test_on_one_device_there_are_no_hooks() -> None:
    model = stack("cpu", "cpu")
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert {type(block) for block in model.blocks} == {Reader}


def test_movers_can_be_installed_on_one_device_to_be_measured() -> None:
    model = Stack(2)
    placement = Placement(entries=(("blocks.0", "cpu"), ("blocks.1", "cpu")))
    dispatch(model, placement, has_movers=True)
    assert all(type(block) is not Reader for block in model.blocks)
    model.script = call_all(model)
    model(hidden := torch.ones(2))
    assert model.blocks[1].last[0][0] is hidden


def test_hooks_of_the_user_see_arguments_at_home() -> None:
    model, seen = Stack(2), []
    model.blocks[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].device))
    dispatch(model, Placement(entries=(("blocks.0", "cpu"), ("blocks.1", "meta"))))
    model.blocks[1].register_forward_pre_hook(lambda module, args: seen.append(args[0].device))
    model.script = call_all(model)
    model(torch.ones(2))
    assert seen == [AWAY, AWAY]


def test_a_block_with_a_mover_is_still_of_its_class() -> None:
    model = stack("cpu", "meta")
    block = model.blocks[1]
    assert isinstance(block, Reader)
    assert type(block).__name__ == "Reader"
    assert type(block) is type(model.blocks[0])
    assert list(block.state_dict()) == ["weight"]
    assert repr(block) == repr(Reader())


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_move_for_themselves(twin_of: Callable[[Stack], Stack]) -> None:
    model = stack("cpu", "meta", "meta")
    twin = twin_of(model)
    assert type(twin.blocks[1]) is type(model.blocks[1])
    twin.script = call_all(twin)
    twin(torch.ones(2))
    first = twin.blocks[1].last[0][0]
    assert first.device == AWAY
    assert twin.blocks[2].last[0][0] is first
    assert not model.blocks[1].seen
    undispatch(twin)
    assert {type(block) for block in twin.blocks} == {Reader}
    assert type(model.blocks[0]) is not Reader


def test_a_dispatched_model_dies_without_the_collector() -> None:
    model = stack("cpu", "meta")
    parameter = weakref.ref(model.blocks[0].weight)
    gc.disable()
    try:
        del model
        assert parameter() is None
    finally:
        gc.enable()

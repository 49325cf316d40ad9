"""What is recorded, and that what is skipped would have been the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duoka import models, virtual
from duoka.forecast.profile import AllocationTrace, Phase
from duoka.planner.placement import Placement
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.dispatch.place_tensors import place
from duoka.tracing.blocks import ModuleGroup, find_groups
from duoka.tracing.fit import RecordedStep, fit
from duoka.tracing.memo import module_signature
from duoka.tracing.record import Recorder
from duoka.tracing.recorded import RecordedPass

WIDTH = 256
DEVICE: Any = "vgpu:0"  # a device only once there are virtual GPUs
STEPS: tuple[tuple[Phase, int], ...] = (
    ("prefill", 37), ("extend", 24), ("decode", 1), ("decode", 1),
)  # fmt: skip


def on_gpu(model: nn.Module) -> None:
    place(model, Placement(entries=(("", "vgpu:0"),)))


def record(model: nn.Module, call: Callable[[], Any], *, skip: bool = False) -> list[RecordedPass]:
    """Two passes of one call, in a world without data that is there already."""
    groups = find_groups(model, call)
    with Recorder(model, groups, skip=skip) as recorder:
        return [recorder.record(call) for _ in range(2)]


def traces_of(name: str, *, batch: int, skip: bool) -> list[tuple[list[AllocationTrace], Any]]:
    """The traces of each step of a language model of six layers."""
    model = models.build({**tiny.CONFIGS[name], "num_hidden_layers": 6}, dtype=torch.bfloat16)
    with virtual.gpus([None], data="meta"), torch.no_grad():
        on_gpu(model)
        groups = find_groups(model, lambda: Stepper(model, 1, torch.device(DEVICE)).step(8))
        stepper = Stepper(model, batch, torch.device(DEVICE))
        found = []
        with Recorder(model, groups, skip=skip) as recorder:
            for phase, tokens in STEPS:
                recorded = recorder.record(partial(stepper.step, tokens))
                sample = RecordedStep(phase, batch, tokens, stepper.past, recorded)
                found.append(fit([sample]))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["llama", "tied", "window", "experts"])
def test_what_is_skipped_would_have_been_the_same(name: str, batch: int) -> None:
    assert traces_of(name, batch=batch, skip=True) == traces_of(name, batch=batch, skip=False)


def language_model() -> tuple[PreTrainedModel, list[ModuleGroup]]:
    model = models.build({**tiny.CONFIGS["llama"], "num_hidden_layers": 6}, dtype=torch.bfloat16)
    on_gpu(model)
    return model, find_groups(model, lambda: Stepper(model, 1, torch.device(DEVICE)).step(8))


@pytest.mark.parametrize("skip", [True, False])
def test_layers_that_are_alike_run_once(skip: bool) -> None:
    with virtual.gpus([None], data="meta"), torch.no_grad():
        model, groups = language_model()
        ran: list[int] = []
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(
                lambda module, args, n=layer.self_attn.layer_idx: ran.append(n)
            )
        with Recorder(model, groups, skip=skip) as recorder:
            recorded = recorder.record(partial(Stepper(model, 1, torch.device(DEVICE)).step, 9))
        # The first layer follows the embedding, and the last one goes before the norm.
        assert ran == ([0, 1, 5] if skip else [0, 1, 2, 3, 4, 5])
        expected = [0, 1, 2, 2, 2, 2, 6, 7, 8] if skip else list(range(9))
        assert recorded.model_blocks == expected[: len(recorded.model_blocks)]


def test_the_model_is_as_it_was() -> None:
    with virtual.gpus([None], data="meta"), torch.no_grad():
        model, groups = language_model()
        own = model.lm_head.forward
        model.lm_head.forward = own  # on the object, as others' hooks put it there
        before = [sorted(vars(module)) for module in model.modules()]
        with Recorder(model, groups, skip=True) as recorder:
            recorder.record(partial(Stepper(model, 1, torch.device(DEVICE)).step, 9))
        assert [sorted(vars(module)) for module in model.modules()] == before
        assert model.lm_head.forward is own
        assert not any(module._forward_hooks for module in model.modules())


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.two = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.one(x)
        z = self.two(y)
        self.kept = y if self.kept is None else torch.cat([self.kept, y])
        return z


def test_allocations_frees_reads_and_what_is_kept() -> None:
    rows = 3
    with virtual.gpus([None], data="meta"), torch.no_grad():
        model = Two()
        on_gpu(model)
        x = torch.empty(rows, WIDTH, device=DEVICE)

        def call() -> None:
            model(x)

        groups = find_groups(model, call)
        model.kept = None
        with Recorder(model, groups, skip=False) as recorder:
            first, second = recorder.record(call), recorder.record(call)
    assert [group.names for group in groups] == [("one",), ("two",)]
    narrow, wide = 4 * rows * WIDTH, 4 * rows * 2 * WIDTH
    one, two = first.traces
    assert (one.sizes, one.events, one.retained) == ([wide], [None], (0,))
    assert two.sizes == [narrow]
    assert two.reads == {(0, 0, 0): wide}
    assert two.events == [None, (0, 1, 0)]
    # In the second call both rows are joined, and what was kept before ends where it was made.
    one, two = second.traces
    assert one.slots == {(0, 0, 0): 0}
    assert one.sizes == [wide]
    assert (0, 0, 0) in one.events
    assert two.sizes == [narrow, 2 * wide]
    assert two.retained == (1,)


def test_arithmetic_and_traffic() -> None:
    rows = 3
    with virtual.gpus([None], data="meta"), torch.no_grad():
        model = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Flatten())
        on_gpu(model)
        x = torch.empty(rows, WIDTH, device=DEVICE)
        (recorded, _) = record(model, partial(model, x))
    (trace,) = recorded.traces
    assert trace.flops == 2 * rows * WIDTH * 2 * WIDTH
    # The product reads both of its factors and writes its result; views move nothing.
    assert trace.moved_bytes == 4 * (rows * WIDTH + 2 * WIDTH * WIDTH + rows * 2 * WIDTH)


class Twice(nn.Module):
    """One layer for two calls with the same argument, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        return self.shared(x) + self.shared(x)


def test_a_block_that_runs_twice_is_recorded_twice() -> None:
    with virtual.gpus([None], data="meta"), torch.no_grad():
        model = Twice()
        on_gpu(model)
        x = torch.empty(3, WIDTH, device=DEVICE)
        skipped, _ = record(model, partial(model, x), skip=True)
        whole, _ = record(model, partial(model, x), skip=False)
    assert skipped.model_blocks == whole.model_blocks
    assert [trace.flops for trace in skipped.traces] == [trace.flops for trace in whole.traces]
    assert [trace.sizes for trace in skipped.traces] == [trace.sizes for trace in whole.traces]


def test_what_tells_modules_apart() -> None:
    def linear(**changes: Any) -> nn.Module:
        module = nn.Linear(4, 4)
        for name, value in changes.items():
            setattr(module, name, value)
        return module

    plain = module_signature(linear())
    assert module_signature(linear()) == plain
    assert module_signature(linear(layer_idx=7)) == plain
    assert module_signature(linear(sliding_window=7)) != plain
    assert module_signature(linear(window=(1, 2))) != plain
    assert module_signature(nn.Linear(4, 5)) != plain
    assert module_signature(nn.Linear(4, 4, bias=False)) != plain
    assert module_signature(nn.Linear(4, 4, dtype=torch.float16)) != plain
    assert module_signature(nn.Sequential(linear())) != module_signature(
        nn.Sequential(linear(), linear())
    )
    assert module_signature(linear().eval()) != plain
    hash(module_signature(nn.TransformerEncoderLayer(8, 2)))

"""cuBLAS's workspace on virtual GPUs: when it is taken, and by what."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from duoka import virtual
from duoka.hardware.gpu_generation import GpuGeneration

WORKSPACE = 8_519_680
MIB = 2**20


@pytest.fixture
def world() -> Iterator[virtual.World]:
    with virtual.gpus([None, None], generation=GpuGeneration(WORKSPACE)) as world:
        yield world


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device="vgpu:0")


def kept(world: virtual.World) -> int:
    """Workspaces on each GPU, when nothing else is there."""
    return world.memory_allocated(0) // WORKSPACE


@pytest.mark.parametrize(
    "multiply",
    [
        lambda: zeros(3, 4) @ zeros(4, 5),
        lambda: zeros(2, 3, 4) @ zeros(2, 4, 5),
        lambda: zeros(3, 4) @ zeros(4),
        lambda: torch.dot(zeros(3), zeros(3)),
        lambda: torch.addmm(zeros(5), zeros(3, 4), zeros(4, 5)),
        lambda: torch.baddbmm(zeros(2, 3, 5), zeros(2, 3, 4), zeros(2, 4, 5)),
        lambda: zeros(3, 5).addmm_(zeros(3, 4), zeros(4, 5)),
        lambda: torch.einsum("bij,bjk->bik", zeros(2, 3, 4), zeros(2, 4, 5)),
        lambda: torch.nn.Linear(4, 5, device="vgpu:0")(zeros(3, 4)),
    ],
)
def test_a_product_takes_it_once(world: virtual.World, multiply: Callable[[], object]) -> None:
    multiply()
    multiply()
    assert [kept(world), world.memory_allocated(1)] == [1, 0]
    world.empty_cache()
    assert kept(world) == 1


@pytest.mark.parametrize(
    "operate",
    [
        lambda: zeros(3, 4) * 2,
        lambda: zeros(0, 4) @ zeros(4, 5),
        lambda: zeros(3, 0) @ zeros(0, 5),
        lambda: torch.outer(zeros(3), zeros(4)),
        lambda: torch._int_mm(zeros(32, 64, dtype=torch.int8), zeros(64, 48, dtype=torch.int8)),
        lambda: torch.nn.functional.scaled_dot_product_attention(*[zeros(1, 2, 8, 64)] * 3),
    ],
)
def test_what_takes_none(world: virtual.World, operate: Callable[[], object]) -> None:
    operate()
    assert kept(world) == 0


@pytest.mark.parametrize("checkpointed", [False, True])
def test_backward_takes_another(world: virtual.World, checkpointed: bool) -> None:
    layer = torch.nn.Linear(4, 4, device="vgpu:0")

    def loss() -> torch.Tensor:
        x = zeros(3, 4).requires_grad_()
        out = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        return out.sum()

    losses = [loss(), loss()]
    assert kept(world) == 1
    for each in losses:
        each.backward()
        assert kept(world) == 2


def test_a_gpu_may_lack_the_room_for_it() -> None:
    refused = pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 8\.1")
    with virtual.gpus([6 * MIB], generation=GpuGeneration(WORKSPACE)), refused:
        zeros(3, 4) @ zeros(4, 5)


def test_it_follows_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with virtual.gpus([None]) as world:
        zeros(3, 4) @ zeros(4, 5)
        assert world.memory_allocated(0) == 131_072

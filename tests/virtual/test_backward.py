"""Errors in backward: a process goes on after them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from duoka import virtual


@pytest.fixture
def world() -> virtual.World:
    return virtual.set_gpus([5 * 2**20, None])


def _fill(world: virtual.World) -> None:
    allocator = world.gpu(0).allocator
    allocator.capacity_bytes = allocator.reserved_bytes


def test_running_out_of_memory_in_backward_is_an_error(world: virtual.World) -> None:
    x = torch.randn(256, 256, device="vgpu:0", requires_grad=True)
    y = x
    for _ in range(4):
        y = F.linear(y, x)
    loss = y.sum()
    _fill(world)
    held = torch.empty(2**17, device="vgpu:0")
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 256\.00 KiB"):
        loss.backward()
    del held
    # The next one isn't disturbed.
    z = torch.ones(3, device="vgpu:1", requires_grad=True)
    (z * 2).sum().backward()
    assert z.grad is not None
    assert z.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_gradient_on_another_device_is_an_error_where_it_meets_the_weight(
    world: virtual.World,
) -> None:
    class Bridge(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.to("vgpu:1")

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return gradient.clone()

    layer = torch.nn.Linear(3, 3).to("vgpu:0")
    loss = Bridge.apply(layer(torch.ones(2, 3, device="vgpu:0"))).sum()
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        loss.backward()


def test_an_error_of_torchs_own_stays_what_it_is(world: virtual.World) -> None:
    x = torch.ones(3, device="vgpu:0", requires_grad=True)
    loss = x.exp().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_an_error_that_code_in_backward_goes_on_after_is_forgotten(world: virtual.World) -> None:
    class Careful(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            try:
                return gradient + torch.ones(3)
            except RuntimeError:
                return gradient

    x = torch.ones(3, device="vgpu:0", requires_grad=True)
    Careful.apply(x).sum().backward()
    loss = x.exp().sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()

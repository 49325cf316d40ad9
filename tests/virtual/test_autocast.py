"""Autocast on virtual GPUs chooses dtypes as CUDA's does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_each_operator_runs_in_its_dtype(dtype: torch.dtype) -> None:
    x = torch.ones(2, 4, device="vgpu:0")
    with torch.autocast("vgpu", dtype=dtype):
        assert torch.is_autocast_enabled("vgpu")
        product = x @ x.T
        assert product.dtype == dtype
        assert functional.linear(x, x).dtype == dtype
        assert functional.scaled_dot_product_attention(*[x[None, None]] * 3).dtype == dtype
        assert product.softmax(-1).dtype == torch.float32
        assert functional.layer_norm(product, (2,)).dtype == torch.float32
        assert product.exp().dtype == product.sum().dtype == torch.float32
        assert (product + 1).dtype == dtype
        assert torch.addcmul(product, product, product.float()).dtype == torch.float32
        assert (x.double() @ x.double().T).dtype == torch.float64
        with torch.autocast("vgpu", enabled=False):
            assert (x @ x.T).dtype == torch.float32
    assert (x @ x.T).dtype == torch.float32


def test_training_under_autocast() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).to("vgpu:1")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    x = torch.randn(16, 8, device="vgpu:1")
    target = torch.randint(0, 4, (16,), device="vgpu:1")
    losses = []
    for _ in range(20):
        with torch.autocast("vgpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert model[0].weight.grad is not None
    assert model[0].weight.grad.dtype == torch.float32
    assert losses[-1] < losses[0]


def test_a_list_of_tensors_is_cast() -> None:
    x = torch.ones(2, 2, device="vgpu:0")
    with torch.autocast("vgpu", dtype=torch.bfloat16):
        assert torch.einsum("ij,jk->ik", x, x).dtype == torch.bfloat16
        assert torch.linalg.multi_dot([x, x, x]).dtype == torch.bfloat16


class _Casts(TorchDispatchMode):
    """Notes the shapes of tensors that are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **kwargs or {})


def test_the_last_argument_is_cast_first() -> None:
    """As on CUDA: the compiler of PyTorch evaluates arguments from right to left."""
    x, weight, bias = (torch.ones(*shape, device="vgpu:0") for shape in ((2, 4), (3, 4), (3,)))
    with _Casts() as casts, torch.autocast("vgpu", dtype=torch.bfloat16):
        functional.linear(x, weight, bias)
    assert casts.shapes == [(3,), (3, 4), (2, 4)]

"""What CUDA takes for the time of one operation; tests/cuda_rig holds the same against CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from duoka import virtual

ROWS, COLUMNS = 64, 8192
Operation = Callable[[Tensor], Tensor]
HALF, FULL = torch.float16, torch.float32


@pytest.mark.parametrize(("operation", "dtype", "trains", "num_bytes"), [
    (lambda x: x.softmax(-1), FULL, True, 4 * 4),
    (lambda x: x.softmax(-1, dtype=FULL), HALF, False, 4),
    (lambda x: x.log_softmax(-1, dtype=FULL), HALF, False, 4),
    (functional.silu, HALF, True, 3 * 2),
    (functional.mish, HALF, True, 3 * 2),
    (lambda x: x.sort(-1)[0], FULL, False, 4 + 8 + 8 + 8 + 4 + 12),
    (lambda x: x.sort(1)[0], FULL, False, 4 + 8 + 8 + 8 + 4 + 12),
    (lambda x: x.sort(0)[0], FULL, False, 4 + 8),
    (lambda x: x.masked_scatter(x > 0, x), FULL, False, 1 + 4 + 8),
])  # fmt: skip
@pytest.mark.parametrize("inference", [False, True])
def test_the_peak_of_an_operation(
    meta_world: virtual.World,
    operation: Operation,
    dtype: torch.dtype,
    trains: bool,
    num_bytes: int,
    inference: bool,
) -> None:
    with torch.inference_mode(inference and not trains):
        x = torch.empty(ROWS, COLUMNS, dtype=dtype, device="vgpu:0", requires_grad=trains)
        before = meta_world.memory_allocated(0)
        out = operation(x)
        if trains:
            out.backward(torch.empty_like(out))
        added = meta_world.max_memory_allocated(0) - before
    # Beside that, sorting has tables: a third of a byte for each number.
    assert num_bytes * ROWS * COLUMNS <= added <= (num_bytes + 0.36) * ROWS * COLUMNS


def test_numbers_of_operations_that_stay_whole(world: virtual.World) -> None:
    gradients = []
    for device in ("cpu", "vgpu:0"):
        x = torch.linspace(-3, 3, 40).to(device).requires_grad_()
        (functional.silu(x) + functional.mish(x)).softmax(0).square().sum().backward()
        assert x.grad is not None
        gradients.append(x.grad.cpu())
    assert torch.allclose(*gradients, atol=1e-6)

"""Devices that meet: refused where CUDA refuses, with its kind of error, else admitted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from duoka import virtual

pytestmark = pytest.mark.usefixtures("world")

TWO_DEVICES = "Expected all tensors to be on the same device, but found at least two devices, "
OTHER = "Expected all tensors to be on the same device, but got {} is on vgpu:1, different from "


def matrix(device: str) -> torch.Tensor:
    return torch.ones(2, 2, device=device)


def places(device: str) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.long, device=device)


A, B = "vgpu:0", "vgpu:1"

ELEMENTWISE: dict[str, Callable[[], object]] = {
    "add": lambda: matrix(A) + matrix(B),
    "in place": lambda: matrix(A).mul_(matrix(B)),
    "scalar of another GPU": lambda: matrix(A) * torch.tensor(2.0, device=B),
    "where": lambda: torch.where(matrix(A) > 0, matrix(A), matrix(B)),
    "cat": lambda: torch.cat([matrix(A), matrix(B)]),
    "stack": lambda: torch.stack([matrix(A), matrix(B)]),
    "comparison": lambda: matrix(A) == matrix(B),
    "mse_loss": lambda: functional.mse_loss(matrix(A), matrix(B)),
    "out": lambda: torch.add(matrix(A), matrix(A), out=matrix(B)),
    "put": lambda: matrix(A).index_put_((places(A),), torch.ones(2, 2, device=B)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_operations_name_both_devices(name: str) -> None:
    with pytest.raises(RuntimeError) as error:
        ELEMENTWISE[name]()
    assert str(error.value).startswith(f"{TWO_DEVICES}vgpu:0 and vgpu:1!")


OTHERS: dict[str, tuple[str, Callable[[], object]]] = {
    "mm": ("mat2", lambda: matrix(A) @ matrix(B)),
    "linear": ("mat2", lambda: functional.linear(matrix(A), matrix(B), matrix(A)[0])),
    "bmm": ("mat2", lambda: torch.bmm(matrix(A)[None], matrix(B)[None])),
    "embedding": ("index", lambda: functional.embedding(places(B), matrix(A))),
    "gather": ("index", lambda: matrix(A).gather(0, places(B)[None])),
    "index_select": ("index", lambda: matrix(A).index_select(0, places(B))),
    "scatter": ("index", lambda: matrix(A).scatter(0, places(B)[None], 1.0)),
    "layer_norm": ("weight", lambda: functional.layer_norm(matrix(A), (2,), matrix(B)[0])),
    "loss": ("target", lambda: functional.cross_entropy(matrix(A), places(B))),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_operations_name_the_argument(name: str) -> None:
    argument, operation = OTHERS[name]
    with pytest.raises(RuntimeError) as error:
        operation()
    assert str(error.value).startswith(OTHER.format(argument)), str(error.value)


@pytest.mark.parametrize("operation", [
    lambda: matrix(A)[places(B)],
    lambda: matrix(A).__setitem__(places(B), 0.0),
    lambda: matrix("cpu")[places(B)],
])  # fmt: skip
def test_indices_of_another_gpu_are_refused(operation: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match="indices should be either on cpu or on the same device"):
        operation()


def test_masks_of_another_gpu_are_refused() -> None:
    with pytest.raises(RuntimeError, match="expected self and mask to be on the same device"):
        matrix(A).masked_fill(matrix(B) > 0, 0.0)
    with pytest.raises(RuntimeError, match="expected self and mask to be on the same device"):
        matrix(A).masked_select(matrix(B) > 0)


def test_cpu_tensors_are_another_device() -> None:
    with pytest.raises(RuntimeError, match="vgpu:0 and cpu!"):
        matrix(A) + matrix("cpu")
    with pytest.raises(RuntimeError, match="cpu and vgpu:0!"):
        matrix("cpu") + matrix(A)
    with pytest.raises(RuntimeError, match="got mat2 is on cpu, different from other"):
        matrix(A) @ matrix("cpu")
    with pytest.raises(RuntimeError, match="same device"):
        matrix("cpu").add_(matrix(A))
    with pytest.raises(RuntimeError, match="same device"):
        torch.tensor(1.0).add_(torch.tensor(1.0, device=A))


def test_cpu_scalars_mix() -> None:
    two = torch.tensor(2.0)
    assert (matrix(A) * two).device == torch.device(A)
    assert (two * matrix(A)).sum().item() == 8
    assert matrix(A).mul_(two).sum().item() == 8
    assert torch.where(matrix(A) > 0, two, matrix(A)).sum().item() == 8
    one = torch.tensor(1.0, device=A)
    assert torch.where(one > 0, one, two).item() == 1
    assert matrix(A).masked_fill(matrix(A) > 0, two).sum().item() == 8
    assert torch.clamp(matrix(A), max=torch.tensor(0.5)).sum().item() == 2


def test_cpu_scalars_do_not_enter_matrix_products() -> None:
    with pytest.raises(RuntimeError):
        torch.dot(torch.ones(1, device=A), torch.tensor(1.0))


def test_cpu_tensors_index() -> None:
    assert matrix(A)[places("cpu")].device == torch.device(A)
    assert matrix(A)[torch.tensor([True, False])].shape == (1, 2)
    changed = matrix(A)
    changed[places("cpu")] = 3.0
    changed[torch.tensor([1])] = torch.tensor(4.0)
    assert changed.tolist() == [[3.0, 3.0], [4.0, 4.0]]


def test_worlds_do_not_mix() -> None:
    first = matrix(A)
    with virtual.gpus([None]):
        second = matrix(A)
    with pytest.raises(RuntimeError, match="another world"):
        first + second
    assert (second + second).sum().item() == 8


def test_no_operation_leaves_its_device() -> None:
    x = matrix(B)
    for result in (x @ x, x.sum(), x.sort().indices, x.nonzero(), x[0], torch.zeros_like(x)):
        assert isinstance(result, virtual.VirtualTensor)
        assert result.device == torch.device(B)

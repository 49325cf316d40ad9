"""Quantized stacks: their bytes, layouts, copies, and what they refuse."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from quantized_experts import dequantize, distance
from torch import nn

from duoka import virtual
from duoka.errors import ModelError
from duoka.models.quantization import Scheme, empty_weight, move_weight, num_bytes
from duoka.models.quantization.stacked import quantize_stack, refused_shape, weight_class

SCHEMES: tuple[Scheme, ...] = ("int8", "int4", "nf4")
# The relative error of a weight drawn from a normal distribution, at most.
ERROR = {"int8": 0.015, "int4": 0.12, "nf4": 0.11}
EXPERTS, ROWS = 3, 48


def stack_of(columns: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(EXPERTS, ROWS, columns, dtype=dtype) * 0.05


def bytes_of(scheme: str, columns: int, *, is_gpu: bool) -> int:
    """Return the bytes of a stack of 16-bit weights, by the documented layouts."""
    padded = columns + (-columns % 128 if is_gpu else 0)
    group = next(size for size in (128, 64, 32) if columns % size == 0)
    if scheme == "nf4":
        return EXPERTS * ROWS * (columns // 2 + columns // 64 * 4)
    if scheme == "int4":
        return EXPERTS * ROWS * (padded // 2 + padded // group * 4)
    if is_gpu:  # two halves of 4 bits, each with a scale and a zero for each group
        return EXPERTS * ROWS * (padded + 2 * padded // (128 if padded % 256 else 256) * 4)
    return EXPERTS * ROWS * (columns + 2)


@pytest.mark.parametrize("device", ["cpu", "vgpu:0"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_stack_is_turned_back_and_takes_the_bytes_of_its_layout(
    scheme: Scheme, device: str
) -> None:
    """1408 columns are those of GLM-4.5-Air; 96 and 64 are padded for tensor cores."""
    with virtual.gpus([None], data="cpu"):
        for columns in (1408, 512, 96, 64):
            if refused_shape(scheme, ROWS, columns):
                assert (scheme, columns) == ("nf4", 96)
                continue
            for dtype in (torch.bfloat16, torch.float32):
                plain = stack_of(columns, dtype)
                stack = quantize_stack(plain.to(device), scheme)
                assert distance(dequantize(stack), plain) < ERROR[scheme]
                shapes = weight_class(scheme, stack.device).tensor_shapes(ROWS, columns, dtype)
                tensors = {name: (part.shape, part.dtype) for name, part in stack.tensors.items()}
                assert tensors == {
                    name: ((EXPERTS, *shape), part) for name, (shape, part) in shapes.items()
                }
                if dtype == torch.bfloat16:
                    is_gpu = device != "cpu"
                    assert num_bytes(stack) == bytes_of(scheme, columns, is_gpu=is_gpu)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transposed_weights_are_quantized_along_their_inputs(scheme: Scheme) -> None:
    plain = stack_of(128)
    stack = quantize_stack(plain, scheme)
    other = quantize_stack(plain.mT.contiguous(), scheme, is_transposed=True)
    assert other.shape == plain.mT.shape
    assert other.sizes == stack.sizes == (ROWS, 128)
    for name, part in stack.tensors.items():
        assert torch.equal(part, other.tensors[name])
    assert torch.equal(dequantize(other), dequantize(stack).mT)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_copies_keep_the_layout(scheme: Scheme) -> None:
    stack = quantize_stack(stack_of(128).mT.contiguous(), scheme, is_transposed=True)
    parameter: Any = nn.Parameter(stack, requires_grad=False)
    for other in (parameter, copy.deepcopy(parameter), parameter.detach(), parameter.to("meta")):
        assert other.weight_class is stack.weight_class
        assert other.is_transposed
        assert (other.shape, other.dtype) == (stack.shape, stack.dtype)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_stack_without_data_becomes_one_of_its_device(scheme: Scheme) -> None:
    """The meta device stands for a GPU, until the stack is allocated on a device."""
    plain = torch.empty(EXPERTS, ROWS, 128, dtype=torch.bfloat16, device="meta")
    stack = quantize_stack(plain, scheme)
    with virtual.gpus([None], data="cpu"):
        for device in ("cpu", "vgpu:0"):
            empty: Any = empty_weight(stack, torch.device(device))
            right = quantize_stack(stack_of(128).to(device), scheme)
            assert empty.weight_class is right.weight_class
            for name, part in empty.tensors.items():
                like = right.tensors[name]
                assert (part.shape, part.device) == (like.shape, like.device)
                assert part.dtype == like.dtype


def test_layouts_do_not_change_between_cpu_and_gpus() -> None:
    """A GPU's layout would be read wrong on the CPU, without an error."""
    with virtual.gpus([None], data="cpu"):
        for scheme, source, target in (
            ("int4", "cpu", "vgpu:0"),
            ("int4", "vgpu:0", "cpu"),
            ("int8", "vgpu:0", "cpu"),
        ):
            stack = quantize_stack(stack_of(128).to(source), scheme)
            with pytest.raises(ModelError, match=f"a weight in {scheme} can't go from {source}"):
                move_weight(stack, torch.device(target))
        stack = quantize_stack(stack_of(128), "nf4")
        moved: Any = move_weight(stack, torch.device("vgpu:0"))
        assert torch.equal(dequantize(moved), dequantize(stack))


def test_shapes_without_a_kernel_are_refused() -> None:
    refusal = "experts of a shape unsupported by int8 (rows in 16s)"
    assert refused_shape("int8", 24, 64) == refusal
    assert refused_shape("int4", 32, 80) is not None
    assert refused_shape("nf4", 32, 96) is not None
    assert refused_shape("int4", 32, 96) is None

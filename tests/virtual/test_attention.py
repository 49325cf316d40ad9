"""Fused attention: the kernel that CUDA would choose, its memory, and its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from closeness import close
from torch.nn import functional

from duoka import virtual
from duoka.virtual.attention import choose_kernel

BATCH, HEADS, TOKENS, HEAD = 2, 4, 256, 16
SCORES = BATCH * HEADS * TOKENS * TOKENS


def operands(
    *, dtype: torch.dtype = torch.float32, key_heads: int = HEADS, value_dim: int = HEAD
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((HEADS, HEAD), (key_heads, HEAD), (key_heads, value_dim))
    return [torch.randn(BATCH, heads, TOKENS, size, dtype=dtype) for heads, size in shapes]


HALF, FULL = torch.bfloat16, torch.float32
MASK = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool)


@pytest.mark.parametrize(("expected", "made", "mask", "options"), [
    ("flash", {"dtype": HALF}, None, {}),
    ("flash", {"dtype": torch.float16}, None, {"is_causal": True}),
    ("flash", {"dtype": HALF, "key_heads": 2}, None, {"enable_gqa": True}),
    ("math", {"dtype": HALF, "key_heads": 2}, None, {}),
    ("math", {"dtype": HALF, "key_heads": 2}, MASK, {"enable_gqa": True}),
    ("math", {"dtype": FULL, "key_heads": 2}, None, {"enable_gqa": True}),
    ("efficient", {"dtype": HALF}, MASK, {}),
    ("efficient", {"dtype": FULL}, None, {}),
    ("efficient", {"dtype": FULL}, MASK, {}),
    ("efficient", {"dtype": HALF, "value_dim": 32}, None, {}),
    ("math", {"dtype": FULL, "value_dim": 3}, None, {}),
    ("math", {"dtype": torch.float64}, None, {}),
])  # fmt: skip
def test_the_choice(
    expected: str, made: dict[str, Any], mask: torch.Tensor | None, options: dict[str, bool]
) -> None:
    options = {"is_causal": False, "enable_gqa": False, **options}
    assert choose_kernel(*operands(**made), mask, **options) == expected


def test_causal_attention_of_unequal_lengths_is_not_flash() -> None:
    query, key, value = operands(dtype=HALF)
    options = {"is_causal": True, "enable_gqa": False}
    assert choose_kernel(query[:, :, :7], key, value, None, **options) == "efficient"
    assert choose_kernel(query[:, :, :7], key, value, None, is_causal=False, enable_gqa=False) == (
        "flash"
    )


def test_switched_off_kernels_are_not_chosen() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        tensors = operands(dtype=HALF)
        assert choose_kernel(*tensors, None, is_causal=False, enable_gqa=False) == "math"


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "scaled": ({}, {"scale": 0.3}),
    "grouped": ({"key_heads": 2}, {"enable_gqa": True}),
    "grouped causal": ({"key_heads": 1}, {"enable_gqa": True, "is_causal": True}),
    "unequal heads": ({"value_dim": 24}, {}),
    "boolean mask": ({}, {"attn_mask": MASK.tril(3)}),
    "additive mask": ({}, {"attn_mask": torch.linspace(-2, 1, TOKENS).expand(TOKENS, TOKENS)}),
    "broadcast heads": ({"key_heads": 1}, {"attn_mask": MASK.tril()}),
}


@pytest.mark.parametrize("dtype", [FULL, HALF], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_numbers_equal_the_cpu(world: virtual.World, name: str, dtype: torch.dtype) -> None:
    made, options = CASES[name]
    tensors = operands(dtype=dtype, **made)
    tolerance = 1e-5 if dtype == FULL else 6e-2
    if "attn_mask" in options and options["attn_mask"].is_floating_point():
        options = {**options, "attn_mask": options["attn_mask"].to(dtype)}
    results = []
    for device in ("cpu", "vgpu:1"):
        placed = [tensor.to(device).detach().requires_grad_() for tensor in tensors]
        moved = {
            key: value.to(device) if isinstance(value, torch.Tensor) else value
            for key, value in options.items()
        }
        out = functional.scaled_dot_product_attention(*placed, **moved)
        out.float().square().mean().mul(100).backward()
        results.append(
            [out.detach().cpu()] + [item.grad.cpu() for item in placed if item.grad is not None]
        )
        with torch.inference_mode():
            again = functional.scaled_dot_product_attention(*placed, **moved)
        assert torch.allclose(again.cpu().float(), out.detach().cpu().float(), atol=tolerance)
    assert len(results[0]) == len(results[1]) == 4
    for expected, found in zip(*results, strict=True):
        assert torch.allclose(expected.float(), found.float(), atol=tolerance, rtol=tolerance)


def test_the_gradient_of_a_bias(world: virtual.World) -> None:
    query, key, value = operands()
    gradients = []
    for device in ("cpu", "vgpu:0"):
        bias = torch.linspace(-1, 1, TOKENS).repeat(TOKENS, 1).to(device).requires_grad_()
        placed = [tensor.to(device) for tensor in (query, key, value)]
        placed[0].requires_grad_()
        functional.scaled_dot_product_attention(*placed, attn_mask=bias).square().sum().backward()
        assert bias.grad is not None
        gradients.append(bias.grad.cpu())
    assert torch.allclose(*gradients, atol=1e-5)


def test_dropout_drops_the_same_forward_and_backward(world: virtual.World) -> None:
    query, key, value = (tensor.to("vgpu:0") for tensor in operands())
    value = torch.ones_like(value).requires_grad_()
    out = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    out.sum().backward()
    assert value.grad is not None
    assert math.isclose(out.sum().item(), (value * value.grad).sum().item(), rel_tol=1e-4)
    assert 0.9 < out.mean().item() < 1.1
    assert out.std().item() > 0
    torch.manual_seed(3)
    first = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    torch.manual_seed(3)
    again = functional.scaled_dot_product_attention(query, key, value, dropout_p=0.5)
    assert close(again, first)


def peak(world: virtual.World, operation: Callable[[], object]) -> int:
    """Return the bytes that an operation adds at most."""
    before = world.memory_allocated(0)
    world.reset_peak_memory_stats(0)
    result = operation()
    added = world.max_memory_allocated(0) - before
    del result
    return added


@pytest.mark.parametrize("data", ["cpu", "meta"])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("dtype", [FULL, HALF], ids=["fp32", "bf16"])
def test_memory_is_that_of_the_kernel(data: str, trains: bool, dtype: torch.dtype) -> None:
    with virtual.gpus([None], data=data) as world:
        tensors = [tensor.to("vgpu:0") for tensor in operands(dtype=dtype)]
        tensors[0].requires_grad_(trains)
        added = peak(world, lambda: functional.scaled_dot_product_attention(*tensors))
        # Only flash keeps the logsumexp of every row when nothing is trained.
        rows = 4 * BATCH * HEADS * TOKENS if trains or dtype == HALF else 0
        # On the device only flash has random states, for which nothing is drawn here.
        states = 2 * 512 if dtype == HALF else 0
        assert added == tensors[0].numel() * dtype.itemsize + rows + states


@pytest.mark.parametrize("data", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [FULL, HALF])
def test_backward_never_holds_the_scores(data: str, dtype: torch.dtype) -> None:
    with virtual.gpus([None], data=data) as world:
        tensors = [tensor.to("vgpu:0").requires_grad_() for tensor in operands(dtype=dtype)]
        out = functional.scaled_dot_product_attention(*tensors).sum()
        assert peak(world, out.backward) < SCORES * dtype.itemsize


def test_a_mask_is_aligned_and_counted(world: virtual.World) -> None:
    query, key, value = (tensor[:, :, :201].to("vgpu:0") for tensor in operands(dtype=HALF))
    mask = torch.ones(1, 1, 201, 201, dtype=torch.bool, device="vgpu:0")
    added = peak(
        world, lambda: functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    )
    # Made of the boolean one, then aligned; the first is given back before the output is made.
    assert added == sum(-(-201 * length * 2 // 512) * 512 for length in (201, 208))


def test_eager_attention_costs_what_it_costs(world: virtual.World) -> None:
    query, key, value = (tensor.to("vgpu:0") for tensor in operands())
    added = peak(world, lambda: (query @ key.transpose(2, 3)).softmax(-1) @ value)
    assert added >= 2 * 4 * SCORES


def test_odd_heads_are_padded(world: virtual.World) -> None:
    tensors = [tensor[..., :13].to("vgpu:0") for tensor in operands(dtype=HALF)]
    out = functional.scaled_dot_product_attention(*tensors)
    assert out.shape == (BATCH, HEADS, TOKENS, 13)
    expected = functional.scaled_dot_product_attention(*[tensor.cpu() for tensor in tensors])
    assert torch.allclose(out.cpu().float(), expected.float(), atol=2e-2)


@pytest.mark.parametrize("data", ["cpu", "meta"])
@pytest.mark.parametrize("by_tokens", [False, True])
def test_flash_lays_its_output_out_as_the_queries_are(data: str, by_tokens: bool) -> None:
    """Else code that makes it contiguous allocates where CUDA doesn't, or the other way round."""
    with virtual.gpus([None], data=data):
        tensors = [torch.ones(2, 4, 6, 8, device="vgpu:0", dtype=torch.bfloat16) for _ in range(3)]
        if by_tokens:
            tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
        out = torch.nn.functional.scaled_dot_product_attention(*tensors)
        assert out.stride() == tensors[0].stride()

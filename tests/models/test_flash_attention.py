"""Stand-ins for flash_attn: the numbers of attention that is written out."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from duoka import virtual
from duoka.models import flash_attention as flash
from duoka.models.transformers4 import execute


def attention(
    q: Tensor, k: Tensor, v: Tensor, left: int = -1, right: int = -1, scale: float | None = None
) -> Tensor:
    """Attention, query by query; the last one belongs to the last key."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    ahead, groups = k.shape[1] - q.shape[1], q.shape[2] // k.shape[2]
    scale = scale or 1 / math.sqrt(q.shape[3])
    for query in range(q.shape[1]):
        seen = [
            key
            for key in range(k.shape[1])
            if (left < 0 or key >= query + ahead - left)
            and (right < 0 or key <= query + ahead + right)
        ]
        if not seen:
            continue
        for head in range(q.shape[2]):
            keys, values = (part[:, seen, head // groups] for part in (k, v))
            weights = (torch.einsum("bd,bkd->bk", q[:, query, head], keys) * scale).softmax(-1)
            out[:, query, head] = torch.einsum("bk,bkd->bd", weights, values)
    return out


def made(batch: int, tokens: int, heads: int) -> Tensor:
    return torch.randn(batch, tokens, heads, 8, dtype=torch.float64)


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (1, 7), (3, 7), (7, 3)])
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 1), (3, -1), (-1, 1), (0, 0)])
def test_attention(
    queries: int, keys: int, key_heads: int, causal: bool, window: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    q, k, v = made(2, queries, 4), made(2, keys, key_heads), made(2, keys, key_heads)
    found = flash.flash_attn_func(q, k, v, softmax_scale=0.3, causal=causal, window_size=window)
    left, right = window[0], 0 if causal else window[1]
    torch.testing.assert_close(found, attention(q, k, v, left, right, 0.3))


def test_gradients_come_back() -> None:
    q, k, v = (made(1, 4, 2).requires_grad_() for _ in range(3))
    inputs = (q, k, v)
    found = torch.autograd.grad(flash.flash_attn_func(q, k, v, 0.0, None, True).sum(), inputs)
    expected = torch.autograd.grad(attention(q, k, v, -1, 0).sum(), inputs)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("named", [False, True])
def test_sequences_behind_each_other(named: bool) -> None:
    torch.manual_seed(0)
    q, k, v = made(1, 9, 4)[0], made(1, 12, 2)[0], made(1, 12, 2)[0]
    ends_q, ends_k = torch.tensor([0, 2, 3, 9]), torch.tensor([0, 5, 6, 12])
    if named:
        found = flash.flash_attn_varlen_func(
            q, k, v, ends_q, ends_k, max_seqlen_q=6, max_seqlen_k=6, causal=True
        )
    else:
        found = flash.flash_attn_varlen_func(q, k, v, ends_q, ends_k, 6, 6, 0.0, None, True)
    for a, b, c, d in ((0, 2, 0, 5), (2, 3, 5, 6), (3, 9, 6, 12)):
        expected = attention(q[None, a:b], k[None, c:d], v[None, c:d], -1, 0)
        torch.testing.assert_close(found[None, a:b], expected)


def test_padding_is_left_out_and_comes_back() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    tensor = torch.arange(16.0).reshape(2, 4, 2)
    rows, indices, ends, longest = flash.unpad_input(tensor, mask)
    assert indices.tolist() == [2, 3, 4, 5, 6]
    assert (ends.tolist(), ends.dtype, longest) == ([0, 2, 5], torch.int32, 3)
    assert torch.equal(rows, tensor.flatten(0, 1)[[2, 3, 4, 5, 6]])
    assert torch.equal(rows, flash.index_first_axis(tensor.flatten(0, 1), indices))
    assert torch.equal(flash.pad_input(rows, indices, 2, 4), tensor * mask[..., None])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved: bool) -> None:
    torch.manual_seed(0)
    x, angles = made(2, 5, 3), torch.rand(9, 3, dtype=torch.float64)
    found = flash.apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved)
    assert torch.equal(found[..., 6:], x[..., 6:])
    for pair in range(3):
        places = [2 * pair, 2 * pair + 1] if interleaved else [pair, pair + 3]
        plane = torch.view_as_complex(x[..., places].contiguous())
        turned = plane * torch.polar(torch.ones_like(angles[:5, :1]), angles[:5, pair, None])
        torch.testing.assert_close(torch.view_as_complex(found[..., places].contiguous()), turned)
    inplace = flash.apply_rotary_emb(x, angles.cos(), angles.sin(), interleaved, inplace=True)
    assert inplace is x
    assert torch.equal(x, found)


def test_it_runs_on_virtual_gpus() -> None:
    with virtual.unnamed_gpus([None]):
        device = virtual.virtual_device(0)
        mask = torch.tensor([[0, 1, 1], [1, 1, 1]], device=device)
        rows, indices, ends, longest = flash.unpad_input(
            torch.ones(2, 3, 2, 8, device=device), mask
        )
        out = flash.flash_attn_varlen_func(
            rows, rows, rows, ends, ends, longest, longest, causal=True
        )
        assert flash.pad_input(out, indices, 2, 3).shape == (2, 3, 2, 8)
        assert out.device == device


CODE = """
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_unpadded_func
from flash_attn.layers.rotary import apply_rotary_emb_func
import flash_attn.bert_padding as padding
import flash_attn
"""


def run(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "such_code"}
    execute(lambda: exec(text, names), names)
    return names


def test_code_that_imports_it_gets_it() -> None:
    names = run(CODE)
    assert names["flash_attn_func"] is flash.flash_attn_func
    assert names["flash_attn_unpadded_func"] is flash.flash_attn_varlen_func
    assert names["padding"].pad_input is names["pad_input"]
    assert names["flash_attn"].bert_padding.unpad_input is names["unpad_input"]
    assert "flash_attn" not in sys.modules


def test_code_that_can_do_without_does() -> None:
    names = run("try:\n    import flash_attn\nexcept ImportError:\n    flash_attn = None")
    assert names["flash_attn"] is None


def test_what_it_lacks_is_missing() -> None:
    with pytest.raises(ImportError, match="cannot import name 'Softmax'"):
        run("from flash_attn.ops.triton import Softmax")
    with pytest.raises(TypeError, match="softcap"):
        flash.flash_attn_func(*[made(1, 2, 1)] * 3, softcap=3.0)  # type: ignore[call-arg]

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from duoka.tracing.op_costs import count_flops

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def count(func: Any, *args: Any) -> int:
    return count_flops(func, args, {}, meta(1))


def test_products() -> None:
    assert count(aten.mm.default, meta(3, 4), meta(4, 5)) == 2 * 3 * 4 * 5
    assert count(aten.add.Tensor, meta(3, 4), meta(3, 4)) == 0
    packed = (meta(3, 64), meta(1, 1, 32, 4), 32, meta(2, 8, 2))
    func = aten._weight_int4pack_mm.default
    assert count_flops(func, packed, {}, meta(3, 8)) == 2 * 3 * 64 * 8


@pytest.mark.parametrize("func", [FLASH, EFFICIENT])
def test_attention_as_torch_counts_it(func: Any) -> None:
    args = [meta(2, 8, 5, 16), meta(2, 8, 7, 16), meta(2, 8, 7, 12)]
    expected = flop_registry[func.overloadpacket](*args, out_val=meta(1))
    assert count(func, *args) == expected == 2 * 2 * 8 * 5 * 7 * (16 + 12)


@pytest.mark.parametrize("func", [FLASH, EFFICIENT])
def test_grouped_queries_count_like_repeated_keys(func: Any) -> None:
    query = meta(2, 8, 5, 16)
    grouped, repeated = meta(2, 2, 7, 16), meta(2, 8, 7, 16)
    assert count(func, query, grouped, grouped) == count(func, query, repeated, repeated)


@pytest.mark.parametrize("func", [FLASH, EFFICIENT])
def test_its_backward_as_torch_counts_it(func: Any) -> None:
    backward = getattr(aten, f"{func.overloadpacket.__name__}_backward").default
    query, key, value, out = meta(2, 8, 5, 16), meta(2, 8, 7, 16), meta(2, 8, 7, 12), meta(1)
    gradient = meta(2, 8, 5, 12)
    expected = flop_registry[backward.overloadpacket](gradient, query, key, value, out_val=out)
    assert count(backward, gradient, query, key, value) == expected
    grouped = meta(2, 2, 7, 16), meta(2, 2, 7, 12)
    assert count(backward, gradient, query, *grouped) == expected

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from duoka import virtual
from duoka.runtime.dispatch.arguments import tensors_in
from duoka.tracing.op_costs import count_bytes, count_flops, count_launches

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


# Bytes that are moved, and what starts a kernel: by hand.


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with virtual.gpus([None], data="meta"):
        yield


class Heard:
    """What the operators of one call moved, those that launch a kernel."""

    def __init__(self, *, alone: bool = False) -> None:
        self.alone = alone
        self.bytes: list[int] = []

    def allocated(self, gpu: object, storage_id: int, num_bytes: int) -> None: ...

    def freed(self, gpu: object, storage_id: int) -> None: ...

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        if count_launches(func, inputs, outputs):
            self.bytes.append(count_bytes(func, inputs, outputs, is_few=self.alone))


def heard(call: Callable[[], object], *, alone: bool = False) -> list[int]:
    listener = Heard(alone=alone)
    with virtual.observe(listener), torch.no_grad():
        call()
    return listener.bytes


def on_gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="vgpu:0")


def test_views_and_allocations_launch_nothing() -> None:
    x = on_gpu(4, 8)
    assert heard(lambda: (x.t(), x.view(32), x[1:3], torch.empty_like(x), x.new_empty(3))) == []
    assert heard(lambda: x + x) == [3 * 4 * 8 * 4]
    assert heard(lambda: x.mul_(2)) == [2 * 4 * 8 * 4]


def test_a_lookup_reads_what_it_takes() -> None:
    table, rows = on_gpu(1000, 16), on_gpu(3, dtype=torch.long)
    expected = 3 * 8 + 2 * 3 * 16 * 4
    assert heard(lambda: torch.nn.functional.embedding(rows, table)) == [expected]
    assert heard(lambda: table.index_select(0, rows)) == [expected]


def test_a_static_cache_is_written_where_it_changes() -> None:
    cache, rows, new = on_gpu(1, 2, 1000, 8), on_gpu(3, dtype=torch.long), on_gpu(1, 2, 3, 8)
    assert heard(lambda: cache.index_copy_(2, rows, new)) == [2 * (3 * 8 + 2 * 3 * 8 * 4)]


def test_one_token_reads_the_matrices_of_its_experts() -> None:
    rows = on_gpu(2, 16, dtype=torch.bfloat16)
    experts = on_gpu(8, 16, 32, dtype=torch.bfloat16)
    ends = on_gpu(8, dtype=torch.int32)
    around = (2 * 16 + 2 * 32) * 2

    def call() -> torch.Tensor:
        return torch._grouped_mm(rows, experts, offs=ends)

    assert heard(call, alone=True)[-1] == around + 2 * 16 * 32 * 2
    assert heard(call)[-1] == around + 8 * 16 * 32 * 2 + 8 * 4

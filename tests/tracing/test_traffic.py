"""What one operator moves, and what starts a kernel: by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from duoka import virtual
from duoka.tracing.traffic import count_bytes, launches


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
        if launches(func, args, kwargs, result):
            self.bytes.append(count_bytes(func, args, kwargs, result, alone=self.alone))


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

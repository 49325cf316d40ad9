"""Operations on virtual GPUs take, at their peak, the memory that they take on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cuda_rig.both_devices import on_both
from torch import Tensor

ROWS, COLUMNS = 96, 8192
OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "softmax of a transposed one": lambda x: x.T.softmax(-1),
    "log softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "sort": lambda x: x.sort(-1),
    "sort of short rows": lambda x: x[:, :1000].sort(-1),
    "sort of columns": lambda x: x.sort(0),
    "scatter": lambda x: x.scatter(1, torch.zeros_like(x, dtype=torch.int64), x),
    "cumsum": lambda x: x.cumsum(-1),
    "multinomial": lambda x: x.multinomial(1),
    "masked scatter": lambda x: x.masked_scatter(x > 0, x),
    "masked scatter by rows": lambda x: x.masked_scatter((x > 0)[:, :1].expand_as(x), x),
}


@pytest.mark.cuda_rig(gpus="8GiB")
def test_peaks_of_operations() -> None:
    def run(kind: str, memory: Any) -> dict[str, int]:
        peaks = {}
        for name, operation in OPERATIONS.items():
            x = torch.empty(ROWS, COLUMNS, device=f"{kind}:0")
            memory.reset_peak_memory_stats(0)
            before = memory.memory_allocated(0)
            operation(x)
            peaks[name] = memory.max_memory_allocated(0) - before
        return peaks

    found, expected = on_both(run)
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.cuda_rig(gpus="8GiB")
def test_autocast_casts_the_last_argument_first() -> None:
    """A free segment of 16 MiB serves the weight's cast, so that the input's needs one of 10."""

    def run(kind: str, memory: Any) -> int:
        # Their casts have 10 and 15 MiB.
        x, weight = (torch.empty(rows, 2**17, device=f"{kind}:0") for rows in (40, 60))
        free = torch.empty(16 * 2**20, dtype=torch.uint8, device=x.device)
        before: int = memory.memory_reserved(0)
        del free
        with torch.autocast(kind, torch.bfloat16, cache_enabled=False):
            torch.nn.functional.linear(x, weight)
        return memory.memory_reserved(0) - before

    found, expected = on_both(run)
    assert found == expected == (10 + 2) * 2**20  # and 2 for the result

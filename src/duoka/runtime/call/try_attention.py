"""The test of FlashAttention with block tables on a GPU, before the engine relies on it there."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from duoka.virtual import attention_numbers  # noqa: F401  (the CPU's kernel of `varlen_attn`)

from ..devices import give_back
from ..lost_gpu import find_lost_gpu

_LOG = logging.getLogger(__name__)
_PAGE_TOKENS, _PAGES, _HEADS, _KEY_HEADS = 256, 8, 8, 2
# Queries and keys of each sequence: a chunk that begins within a page, a whole prompt, two decoding
# sequences, padding, and an unused row.
_QUERIES, _KEYS = (40, 70, 1, 1, 3, 0), (553, 70, 257, 9, 3, 0)
_TOLERANCE = 0.02  # bfloat16 rounds by 0.004; a wrong mask or page changes the result by 0.3


def reads_in_place(device: torch.device, head_dim: int) -> bool:
    """Return True if attention on a device may read pages in place.

    On CUDA the results for random numbers are compared with those of the CPU, once per process, and
    a difference or an error is logged as a warning. `DUOKA_ATTENTION` omits the comparison.
    """
    choice = os.environ.get("DUOKA_ATTENTION")
    if device.type != "cuda" or choice in ("flash", "gather"):
        return choice != "gather"
    fault = find_fault(device, head_dim)
    if fault:
        _LOG.warning(
            "%s: FlashAttention over pages can't be used (%s); keys and values are gathered, which "
            "is slower and takes more memory than forecast",
            device,
            fault,
        )
    return not fault


@cache
def find_fault(device: torch.device, head_dim: int) -> str:
    """Describe how attention over pages on a device differs from the CPU's; "" if it doesn't."""
    try:
        for window in (-1, 99):
            expected, computed = (_attend(where, head_dim, window) for where in ("cpu", device))
            distance = float((computed.cpu() - expected).norm() / expected.norm())
            if not distance < _TOLERANCE:  # also NaN
                return f"its results differ from the CPU's by {distance:.1%}"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a kernel or its checks raise
        if lost := find_lost_gpu(error):
            raise lost from error
        return str(error).partition("\n")[0][:200]
    finally:
        give_back()  # it isn't in the forecast
    return ""


def _attend(device: str | torch.device, head_dim: int, window: int) -> Tensor:
    """Attend on a device, with the same random numbers on all."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, head_dim, generator=generator).bfloat16().to(device)

    def numbers(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    query = draw(sum(_QUERIES), _HEADS)
    keys, values = (draw(_PAGES, _PAGE_TOKENS, _KEY_HEADS) for _ in range(2))
    offsets = numbers([sum(_QUERIES[:row]) for row in range(len(_QUERIES) + 1)])
    tables = numbers([[5, 0, 3], [2, 7, 7], [6, 1, 7], [4, 7, 7], [7, 7, 7], [7, 7, 7]])
    attended: Any = varlen_attn(
        query, keys, values, offsets, offsets, max(_QUERIES), tables.shape[1] * _PAGE_TOKENS,
        window_size=(window, 0), enable_gqa=True, seqused_k=numbers(_KEYS), block_table=tables,
        num_splits=1,
    )  # fmt: skip
    return attended  # type: ignore[no-any-return]

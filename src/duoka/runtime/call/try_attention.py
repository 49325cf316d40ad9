"""The test of FlashAttention with block tables on a GPU, before the engine relies on it there."""

from __future__ import annotations

import logging
import os
from functools import cache

import torch
from torch import Tensor

from ..devices import give_back
from ..lost_gpu import find_lost_gpu
from .paged_attention import attend_in_place

_LOG = logging.getLogger(__name__)
_PAGE_TOKENS, _PAGES, _HEADS, _KEY_HEADS = 256, 8, 8, 2
# Queries and keys of each sequence: a chunk that begins within a page, a whole prompt, two decoding
# sequences, padding, and an unused row.
_QUERIES, _KEYS = (40, 70, 1, 1, 3, 0), (553, 70, 257, 9, 3, 0)
TOLERANCE = 0.02  # bfloat16 rounds by 0.004; a wrong mask or page changes the result by 0.3


def reason_to_gather(device: torch.device, head_dim: int) -> str:
    """Return the reason why attention on a device can't read pages in place; "" if it can.

    On CUDA the results for random numbers are compared with those of the CPU, once per process, and
    a difference or an error is logged as a warning. `DUOKA_ATTENTION` omits the comparison.
    """
    choice = os.environ.get("DUOKA_ATTENTION")
    if device.type != "cuda" or choice in ("flash", "gather"):
        return "DUOKA_ATTENTION=gather" if choice == "gather" else ""
    if fault := find_fault(device, head_dim):
        _LOG.warning(
            "%s: FlashAttention over pages can't be used (%s); keys and values are gathered, which "
            "is slower and takes more memory than forecast",
            device,
            fault,
        )
    return fault


@cache
def find_fault(device: torch.device, head_dim: int) -> str:
    """Describe how attention over pages on a device differs from the CPU's; "" if it doesn't."""
    try:
        difference = attention_difference(device, head_dim)
        if not difference < TOLERANCE:  # also NaN
            return f"its results differ from the CPU's by {difference:.1%}"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a kernel or its checks raise
        if lost := find_lost_gpu(error):
            raise lost from error
        return str(error).partition("\n")[0][:200] or type(error).__name__
    finally:
        give_back()  # it isn't in the forecast
    return ""


def attention_difference(device: torch.device, head_dim: int) -> float:
    """Return the largest relative difference of attention over pages on a device from the CPU's."""
    differences = []
    for window in (0, 100):
        expected, computed = (_attend(where, head_dim, window) for where in ("cpu", device))
        differences.append((computed.cpu() - expected).norm() / expected.norm())
    return float(torch.stack(differences).max())  # NaN if one of them is


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
    return attend_in_place(
        query, keys, values, (offsets, numbers(_KEYS), tables), max(_QUERIES),
        scale=None, window=window,
    )  # fmt: skip

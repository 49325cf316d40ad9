"""Fill a quantized weight with rows of the original weight, a few at a time.

Rows are quantized independently, so the whole weight is never in memory in its original dtype: only
the quantized weight, some original rows, and the temporaries of their quantization. The result is
bitwise equal to quantizing the whole weight at once.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable

import torch
from torch import Tensor

from .composed import parts
from .stacked import Int4Tiles
from .stored import StoredRows
from .weights import INT4_CLASSES, computes_in, quantize, scheme_of

_ALIGNED_ROWS = 64
"""The number of rows that int4's layouts interleave: only whole groups can be filled."""
_INTERLEAVED = INT4_CLASSES | {"Int8Tiles"}
_WORKING_ELEMENTS = 2**20
"""About the number of elements to quantize at once; temporaries take some 20 bytes for each."""
# The dimension of the weight's rows in each part of a quantized weight.
_ROW_DIMENSION = {
    "qdata": 0, "weight": 0, "numbers": 0, "scale": 0, "zero_point": 0, "packed": 0, "absmax": 0,
    "scale_and_zero": 1,
}  # fmt: skip


def takes_rows(target: Tensor, start: int, stop: int) -> bool:
    """Return True if the rows `start` to `stop` can be filled separately from other rows."""
    if type(target).__name__ not in _INTERLEAVED:
        return True
    return start % _ALIGNED_ROWS == 0 and (stop % _ALIGNED_ROWS == 0 or stop == target.shape[0])


def fill_rows(
    target: Tensor, start: int, source: Tensor | StoredRows, device: torch.device
) -> None:
    """Quantize rows on a device, or copy them, into a quantized weight from row `start` on."""
    assert takes_rows(target, start, start + len(source))
    step = max(_WORKING_ELEMENTS // source.shape[1] // _ALIGNED_ROWS, 1) * _ALIGNED_ROWS
    for first in range(0, len(source), step):
        _fill(target, start + first, source[first : first + step], device)


def _fill(target: Tensor, start: int, source: Tensor | StoredRows, device: torch.device) -> None:
    """Quantize rows at once; if memory is short, in two halves, recursively."""
    if not _try_fill(target, start, source, device):
        half = len(source) // 2 // _ALIGNED_ROWS * _ALIGNED_ROWS
        _fill(target, start, source[:half], device)
        _fill(target, start + half, source[half:], device)


def _try_fill(
    target: Tensor, start: int, source: Tensor | StoredRows, device: torch.device
) -> bool:
    """Quantize rows at once; return False if memory is short and the rows can be halved."""
    try:
        _write(target, start, len(source), _parts_of(source, target, device))
    except torch.OutOfMemoryError as error:
        if len(source) < 2 * _ALIGNED_ROWS:
            raise
        # The frames of the traceback hold temporaries: free them.
        traceback.clear_frames(error.__traceback__)
        return False
    return True


def _parts_of(
    source: Tensor | StoredRows, target: Tensor, device: torch.device
) -> Iterable[Tensor]:
    """Quantize rows on a device, and return their parts."""
    if isinstance(source, StoredRows):
        place = device if isinstance(target, Int4Tiles) else target.device
        rows = source.map(lambda tensor: tensor.contiguous().to(place))
        return rows.packed(type(target).__name__)
    taken = source.contiguous().to(device=device, dtype=computes_in(target))
    make = getattr(type(target), "of", None)  # of duoka's own classes
    return parts(quantize(taken, scheme_of(target)) if make is None else make(taken)).values()


def _write(target: Tensor, start: int, count: int, sources: Iterable[Tensor]) -> None:
    """Copy the parts of quantized rows into the parts of a weight, from row `start` on."""
    total = target.shape[0]
    for (name, part), source in zip(parts(target).items(), sources, strict=True):
        dim = _ROW_DIMENSION[name]
        # An index of the dimension has several rows, or a row has several indices. In a weight of
        # 4,096 rows and 1,024 columns, rows 128:192 are the indices 16:24 of int4's packed tensor
        # (512 indices of 8 rows), and 65536:98304 of nf4's (512 bytes for each row).
        place = part.narrow(dim, start * part.shape[dim] // total, count * part.shape[dim] // total)
        place.copy_(source.reshape(place.shape))

"""Filling a quantized weight with rows of the original, a few at a time.

Each row is quantized by itself, so that a weight is never whole in its original type: beside the
quantized weight only some rows are in memory, with the temporaries of their quantization. Results
are bit for bit those of the whole weight at once.
"""

from __future__ import annotations

import traceback

import torch
from torch import Tensor

from .composed import parts
from .weights import computes_in, quantize, scheme_of

_ALIGNED_ROWS = 64
"""The layouts for int4 keep so many rows together."""
_WORKING_ELEMENTS = 2**20
"""Rows are taken until they have so many numbers; quantizing takes some 20 bytes for each."""
# By part: the dimension along which its rows lie.
_ROW_DIMENSION = {
    "qdata": 0, "scale": 0, "zero_point": 0, "packed": 0, "absmax": 0, "scale_and_zero": 1,
}  # fmt: skip


def takes_rows(target: Tensor, start: int, stop: int) -> bool:
    """Return True if the rows from `start` to `stop` can be filled by themselves."""
    if scheme_of(target) != "int4":
        return True
    return start % _ALIGNED_ROWS == 0 and (stop % _ALIGNED_ROWS == 0 or stop == target.shape[0])


def fill_rows(target: Tensor, start: int, source: Tensor) -> None:
    """Quantize rows, and write them into a quantized weight."""
    assert takes_rows(target, start, start + len(source))
    step = max(_WORKING_ELEMENTS // source.shape[1] // _ALIGNED_ROWS, 1) * _ALIGNED_ROWS
    for first in range(0, len(source), step):
        _fill(target, start + first, source[first : first + step])


def _fill(target: Tensor, start: int, source: Tensor) -> None:
    """Quantize rows at once, or in two halves where memory is short."""
    if not _does_fill(target, start, source):
        half = len(source) // 2 // _ALIGNED_ROWS * _ALIGNED_ROWS
        _fill(target, start, source[:half])
        _fill(target, start + half, source[half:])


def _does_fill(target: Tensor, start: int, source: Tensor) -> bool:
    try:
        taken = source.to(device=target.device, dtype=computes_in(target))
        _write(target, start, quantize(taken, scheme_of(target)))
    except torch.OutOfMemoryError as error:
        if len(source) < 2 * _ALIGNED_ROWS:
            raise
        # The frames of the error hold temporaries.
        traceback.clear_frames(error.__traceback__)
        return False
    return True


def _write(target: Tensor, start: int, rows: Tensor) -> None:
    total, count = target.shape[0], rows.shape[0]
    sources = parts(rows)
    for name, part in parts(target).items():
        dim = _ROW_DIMENSION[name]
        # A dimension has several rows in one index, or several indices for one row. Rows 128:192
        # of 4,096 rows and 1,024 columns are the indices 16:24 of int4's packed tensor, with
        # 8 rows in each of 512, and 65536:98304 of nf4's, with 512 bytes for each row.
        place = part.narrow(dim, start * part.shape[dim] // total, count * part.shape[dim] // total)
        place.copy_(sources[name])

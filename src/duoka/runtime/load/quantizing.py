"""Quantizing on the way: what comes from a file in 16 bit becomes a weight in fewer.

Rows go to the weight's device a few at a time and are quantized there. Where a piece of a weight
isn't made of whole rows, or its rows don't lie as the layout takes them, the weight is gathered on
the host first.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from duoka.models.boxes import Box
from duoka.models.quantization import computes_in, fill_rows, takes_rows


class Quantizer:
    """Fills quantized weights from pieces of the originals, in any order and in several threads."""

    def __init__(self) -> None:
        self._gathered: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        self._lock = threading.Lock()

    def put(self, name: str, target: Tensor, box: Box, source: Tensor) -> None:
        """Quantize a piece of a weight."""
        (start, stop), columns = box
        if columns == (0, target.shape[1]) and takes_rows(target, start, stop):
            fill_rows(target, start, source)
            return
        whole = self._gather(name, target, box, source)
        if whole is not None:
            fill_rows(target, 0, whole)

    def _gather(self, name: str, target: Tensor, box: Box, source: Tensor) -> Tensor | None:
        """The whole weight when its last piece has come."""
        with self._lock:
            if name not in self._gathered:
                self._gathered[name] = torch.empty(target.shape, dtype=computes_in(target))
                self._missing[name] = target.numel()
            whole = self._gathered[name]
        whole[tuple(slice(start, stop) for start, stop in box)] = source
        with self._lock:
            self._missing[name] -= source.numel()
            if self._missing[name]:
                return None
            return self._gathered.pop(name)

"""Counts that stand for speed, of what one thread does on virtual GPUs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

_COPY, _TO_COPY = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default

Copies = Counter[tuple[str, str, tuple[int, ...]]]
"""By source, target and shape; tensors without numbers are left out."""


class Counts:
    """A listener of virtual GPUs (see `virtual.observe`): copies, allocations and what is freed."""

    def __init__(self) -> None:
        self.copies: Copies = Counter()
        self.allocations = self.frees = self.num_bytes = 0

    def allocated(self, gpu: Any, storage_id: int, num_bytes: int) -> None:
        self.allocations += 1
        self.num_bytes += num_bytes

    def freed(self, gpu: Any, storage_id: int) -> None:
        self.frees += 1

    def operation(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> None:
        if func in (_COPY, _TO_COPY):
            source, target = (args[1], args[0]) if func is _COPY else (args[0], result)
            if source.device != target.device and source.numel():
                self.copies[str(source.device), str(target.device), tuple(source.shape)] += 1

    @property
    def between_gpus(self) -> Copies:
        """The copies from one GPU to another."""
        return Counter({copy: n for copy, n in self.copies.items() if "cpu" not in copy[:2]})

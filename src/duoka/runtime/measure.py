"""Measurement: when tokens come, and the peaks of the devices' memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from duoka.report.measured import Measured

from .devices import peak_bytes, synchronize


class Clock(StoppingCriteria):
    """Notes when the tokens of one generation come, and ends nothing."""

    def __init__(self) -> None:
        self.started_at = time.monotonic()
        self.times: list[float] = []
        self.num_rows = self.context_tokens = 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """See `StoppingCriteria`: one flag for each sequence."""
        synchronize(input_ids.device)  # which may still be computing the token
        self.times.append(time.monotonic())
        self.num_rows, self.context_tokens = input_ids.shape
        return torch.zeros(self.num_rows, dtype=torch.bool, device=input_ids.device)


class Pace:
    """How fast the answers of one generator came."""

    def __init__(self) -> None:
        self._clocks: list[Clock] = []

    def start(self) -> Clock:
        """The clock of the next generation."""
        self._clocks.append(Clock())
        return self._clocks[-1]

    def measured(self, names: Iterable[str]) -> Measured:
        """What there is to say so far, with the peaks of these devices."""
        clocks = [clock for clock in self._clocks if clock.times]
        waited = [clock.times[0] - clock.started_at for clock in clocks]
        tokens = sum(clock.num_rows * (len(clock.times) - 1) for clock in clocks)
        seconds = sum(clock.times[-1] - clock.times[0] for clock in clocks)
        return Measured(
            devices=tuple(filter(None, map(peak_bytes, names))),
            context_tokens=max((clock.context_tokens for clock in clocks), default=0),
            first_token_seconds=sum(waited) / len(waited) if waited else None,
            tokens_per_second=tokens / seconds if seconds else None,
        )

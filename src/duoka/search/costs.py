"""Costs: what the search asks about stages, and what it knows of their bytes so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from duoka.fleet import Device

from .programme import Floats


class StageCosts(Protocol):
    """What the search asks about stages, which are half-open runs of blocks."""

    @property
    def num_blocks(self) -> int:
        """Blocks in execution order."""

    @property
    def lower_bound_bytes(self) -> npt.NDArray[np.int64]:
        """[num_blocks + 1, num_blocks + 1], by start and stop: at most what is reserved."""

    @property
    def alike(self) -> npt.NDArray[np.int64]:
        """[num_blocks + 1, num_blocks + 1]: stages of equal numbers reserve equal bytes.

        A model repeats its layers, so one exact answer is an answer for many stages. Unique
        numbers are right when nothing is known.
        """

    @property
    def boundary_bytes(self) -> Floats:
        """[num_blocks + 1]: bytes that one request sends over the cut before each block."""

    @property
    def boundary_transfers(self) -> Floats:
        """[num_blocks + 1]: in how many pieces it does, each with the link's latency."""

    def reserved_bytes(self, start: int, stop: int, budget_bytes: int) -> int | None:
        """Exact peak of reserved bytes on a device of that budget; None when it doesn't fit."""

    def seconds(self, device: Device) -> Floats | None:
        """[num_blocks + 1, num_blocks + 1]: seconds of one request; None when unknown."""


class Memory:
    """What is known of stages' reserved bytes, by budget: bounds, made exact one by one."""

    def __init__(self, costs: StageCosts, budgets: Sequence[int]) -> None:
        shape = (costs.num_blocks + 1, costs.num_blocks + 1)
        stages = np.triu(np.ones(shape, dtype=bool), 1)
        bound = np.where(stages, costs.lower_bound_bytes, np.inf)
        self._costs = costs
        self._alike = np.where(stages, costs.alike, -1)
        self._exact = {budget: np.zeros(shape, dtype=bool) for budget in budgets}
        self.num_evaluations = 0
        self.bytes = {budget: bound.copy() for budget in budgets}
        self.fits = {budget: bound <= budget for budget in budgets}

    def settle(self, stages: Sequence[tuple[int, int, int]]) -> bool:
        """Make (start, stop, budget) exact, the tightest first, up to one that doesn't fit.

        Returns whether all were what they were thought to be.
        """
        as_thought = True
        for start, stop, budget in sorted(
            stages, key=lambda stage: stage[2] - self.bytes[stage[2]][stage[:2]]
        ):
            if self._exact[budget][start, stop]:
                continue
            self.num_evaluations += 1
            alike = self._alike == self._alike[start, stop]
            self._exact[budget][alike] = True
            reserved = self._costs.reserved_bytes(start, stop, budget)
            if reserved is None or reserved > budget:
                self.fits[budget][alike] = False
                return False
            assert reserved >= self.bytes[budget][alike].max(), "the lower bound is none"
            as_thought &= bool(reserved == self.bytes[budget][alike].min())
            self.bytes[budget][alike] = reserved
        return as_thought

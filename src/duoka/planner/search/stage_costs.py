"""Costs: what the search asks about stages, and what it knows of their bytes so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from duoka.hardware.device import Device

from .dynamic_programme import Floats


class StageCosts(Protocol):
    """What the search asks about stages, which are half-open runs of blocks.

    What a stage needs may depend on its place from the end, which counts from 1.
    """

    @property
    def num_blocks(self) -> int:
        """Blocks in execution order."""

    @property
    def num_places(self) -> int:
        """How many places from the end differ; all before the last of them are like it."""

    def bounds_at(self, place: int) -> npt.NDArray[np.int64]:
        """[num_blocks + 1, num_blocks + 1], by start and stop: at most what is requested."""

    @property
    def alike(self) -> npt.NDArray[np.int64]:
        """[num_blocks + 1, num_blocks + 1]: stages of equal numbers request equal bytes.

        That is at equal places. A model repeats its layers, so one exact answer is an answer for
        many stages. Unique numbers are right when nothing is known.
        """

    @property
    def boundary_bytes(self) -> Floats:
        """[num_blocks + 1]: bytes that a request sends over the cut before each block."""

    @property
    def boundary_transfers(self) -> Floats:
        """[num_blocks + 1]: in how many pieces it does, each with the link's latency."""

    def requested_bytes(
        self, start: int, stop: int, budget_bytes: int, *, place: int
    ) -> int | None:
        """Exact peak of requested bytes on a device of that budget; None when it doesn't fit."""

    def usable_bytes(self, budget_bytes: int) -> int:
        """What of a budget a stage may need: a lower bound beyond it rules the stage out."""

    def seconds(self, device: Device) -> Floats | None:
        """[num_blocks + 1, num_blocks + 1]: seconds of a request; None when unknown."""

    @property
    def time_objective(self) -> Literal["latency", "throughput"] | None:
        """What makes the work quick; None where what is quickest for one request isn't for many."""


class KnownBytes:
    """What is known of stages' requested bytes: bounds, made exact one by one.

    `bytes` and `fits` are by budget and place, each [num_blocks + 1, num_blocks + 1], and replaced
    by another array when more is known: so whoever made tables of them knows by identity whether
    these still hold. A stage that is refused is refused for all that are like it.
    """

    def __init__(
        self,
        costs: StageCosts,
        budgets: Sequence[int],
        num_places: int,
        alternatives: Sequence[StageCosts] = (),
    ) -> None:
        shape = (costs.num_blocks + 1, costs.num_blocks + 1)
        stages = np.triu(np.ones(shape, dtype=bool), 1)
        self._costs = costs
        self.usable_bytes = costs.usable_bytes
        self._alike = np.where(stages, costs.alike, -1)
        self.num_places = min(num_places, costs.num_places)
        self.bytes: dict[tuple[int, int], Floats] = {}
        for place in range(1, self.num_places + 1):
            least = np.minimum.reduce([c.bounds_at(place) for c in (costs, *alternatives)])
            bound = np.where(stages, least, np.inf)
            self.bytes |= {(budget, place): bound for budget in budgets}
        self.fits = {key: bound <= costs.usable_bytes(key[0]) for key, bound in self.bytes.items()}
        self._exact: set[tuple[tuple[int, int], int]] = set()

    def key(self, budget: int, place: int) -> tuple[int, int]:
        """Where a stage at a place from the end is looked up."""
        return budget, min(place, self.num_places)

    def settle(self, stages: Sequence[tuple[int, int, tuple[int, int]]]) -> bool:
        """Make (start, stop, key) exact, the tightest first, up to one that doesn't fit.

        Returns whether all were what they were thought to be.
        """
        # All stages of an optimum in one batch, and not one after the other with a search between:
        # mostly they are all needed. But what is tightest is likeliest to be refused, and then the
        # next optimum has other stages: the rest isn't worth its replays.
        as_thought = True
        for start, stop, key in sorted(
            stages, key=lambda stage: stage[2][0] - self.bytes[stage[2]][stage[:2]]
        ):
            number = int(self._alike[start, stop])
            if (key, number) in self._exact:
                continue
            budget, place = key
            self._exact.add((key, number))
            alike = self._alike == number
            requested = self._costs.requested_bytes(start, stop, budget, place=place)
            if requested is None or requested > budget:
                self.fits[key] = self.fits[key] & ~alike
                return False
            bounds = self.bytes[key][alike]
            assert requested >= bounds.max(), "the lower bound is none"
            if requested != bounds.min():
                as_thought = False
                self.bytes[key] = np.where(alike, requested, self.bytes[key])
        return as_thought

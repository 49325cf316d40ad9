"""Known bytes: bounds and exact values of the bytes of stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from duoka.forecast.costs import Costs
from duoka.hardware.fleet import Fleet

from .dynamic_programme import Floats


class KnownBytes:
    """The requested bytes of stages: bounds, replaced by exact values step by step.

    `bytes` and `fits` are by budget and place, each [num_blocks + 1, num_blocks + 1]. The result of
    a stage holds for its class (`Costs.stage_classes`). With `alternatives` a bound is the least of
    the bounds of all these costs.
    """

    def __init__(self, costs: Costs, fleet: Fleet, alternatives: Sequence[Costs] = ()) -> None:
        shape = (costs.num_blocks + 1, costs.num_blocks + 1)
        stages = np.triu(np.ones(shape, dtype=bool), 1)
        self._costs = costs
        self.usable_bytes = costs.usable_bytes
        self.num_places = min(len(fleet.devices), costs.num_blocks, costs.num_places)
        self.bytes: dict[tuple[int, int], Floats] = {}
        for place in range(1, self.num_places + 1):
            bounds = np.minimum.reduce([c.bounds_at(place) for c in (costs, *alternatives)])
            bound = np.where(stages, bounds, np.inf)
            self.bytes |= {(device.budget_bytes, place): bound for device in fleet.devices}
        self.fits = {key: bound <= costs.usable_bytes(key[0]) for key, bound in self.bytes.items()}
        self._exact: set[tuple[tuple[int, int], int]] = set()

    def key(self, budget: int, place: int) -> tuple[int, int]:
        """Return the key of a stage at a place from the end."""
        return budget, min(place, self.num_places)

    def settle(self, stages: Sequence[tuple[int, int, tuple[int, int]]]) -> bool:
        """Replace bounds by exact bytes for stages (start, stop, key), tightest first.

        Stop at the first stage beyond its budget. Return True if every bound was exact already.
        """
        # Stages of the same class (`stage_classes`) need the same bytes: layers 3 to 9 as much as
        # layers 13 to 19. One replay settles them all, at the budgets and places it was made for.
        # All stages of an optimum in one batch, instead of a search after each: mostly all of them
        # are needed. But the tightest stage is likeliest to be refused, and then the next optimum
        # has other stages: the rest isn't worth its replays.
        #
        # Example: an optimum of [0, 3) on 24 GiB with a bound of 20 GiB and [3, 9) on 12 GiB with
        # 11 GiB. [3, 9) has less to spare and is replayed first, with 11.5 GiB as its result; it
        # holds for [4, 10) on 12 GiB as well, if that is of the same class. Then [0, 3).
        as_thought = True
        if not self._exact:  # bounds for the room take longer: not where nothing can fit
            numbers = self._costs.stage_classes
            self._alike = np.where(np.tri(len(numbers), dtype=bool), -1, numbers)
            for key, fits in self.fits.items():
                usable = self.usable_bytes(key[0])
                self.fits[key] = fits & (self._costs.room_bounds(key[0]) <= usable)
            if not all(self.fits[key][start, stop] for start, stop, key in stages):
                return False
        for start, stop, key in sorted(
            stages, key=lambda stage: stage[2][0] - self.bytes[stage[2]][stage[:2]]
        ):
            number = int(self._alike[start, stop])
            if (key, number) in self._exact:
                continue
            budget, place = key
            self._exact.add((key, number))
            is_equal = self._alike == number
            requested = self._costs.requested_bytes(start, stop, budget, place=place)
            if requested is None or requested > budget:
                self.fits[key] = self.fits[key] & ~is_equal
                return False
            bounds = self.bytes[key][is_equal]
            assert requested >= bounds.max(), "the lower bound is none"
            if requested != bounds.min():
                as_thought = False
                self.bytes[key] = np.where(is_equal, requested, self.bytes[key])
        return as_thought

"""Known bytes: lower bounds of the bytes of stages, replaced by exact values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from duoka.forecast.costs import Costs
from duoka.hardware.fleet import Fleet

from .dynamic_programme import Floats


class KnownBytes:
    """The requested bytes of stages: lower bounds, replaced by exact values as stages are settled.

    `bytes` and `fits` have a matrix [start, stop] for each key (budget, place from the end): the
    bytes of each stage, and True if it fits. A replay of a stage settles all stages of its class
    (`Costs.stage_classes`). With `alternatives`, a bound is the least bound under any of the costs.
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
        """Return the key of `bytes` and `fits` for a budget and a place from the end."""
        return budget, min(place, self.num_places)

    def settle(self, stages: Sequence[tuple[int, int, tuple[int, int]]]) -> bool:
        """Replace bounds by exact bytes for stages (start, stop, key), tightest first.

        Stop at the first stage that doesn't fit its budget. Return True if all stages fit and every
        bound was equal to the exact bytes.
        """
        # Stages of the same class (`stage_classes`) need the same bytes: layers 3 to 9 as much as
        # layers 13 to 19. One replay settles them all, for its budget and place. All stages of an
        # optimum are settled before the next search, because mostly all of them are needed. But if
        # a stage doesn't fit, the next optimum has other stages, and replays of the rest would be
        # wasted: so the tightest stage, the likeliest not to fit, is first.
        #
        # Example: an optimum of [0, 3) on 24 GiB with a bound of 20 GiB and [3, 9) on 12 GiB with
        # 11 GiB. [3, 9) has less headroom and is replayed first, with 11.5 GiB as its result; the
        # result holds for [4, 10) on 12 GiB as well, if its class is the same. Then [0, 3).
        was_exact = True
        # At the first call, tighten `fits` by bounds of reserved bytes (`room_bounds`). They take
        # longer, so a search that ends before any stage is settled doesn't compute them.
        if not self._exact:
            numbers = self._costs.stage_classes
            self._class_of = np.where(np.tri(len(numbers), dtype=bool), -1, numbers)
            for key, fits in self.fits.items():
                usable = self.usable_bytes(key[0])
                self.fits[key] = fits & (self._costs.room_bounds(key[0]) <= usable)
            if not all(self.fits[key][start, stop] for start, stop, key in stages):
                return False
        for start, stop, key in sorted(
            stages, key=lambda stage: stage[2][0] - self.bytes[stage[2]][stage[:2]]
        ):
            number = int(self._class_of[start, stop])
            if (key, number) in self._exact:
                continue
            budget, place = key
            self._exact.add((key, number))
            is_equal = self._class_of == number
            requested = self._costs.requested_bytes(start, stop, budget, place=place)
            if requested is None or requested > budget:
                self.fits[key] = self.fits[key] & ~is_equal
                return False
            bounds = self.bytes[key][is_equal]
            assert requested >= bounds.max(), "the lower bound exceeds the exact bytes"
            if requested != bounds.min():
                was_exact = False
                self.bytes[key] = np.where(is_equal, requested, self.bytes[key])
        return was_exact

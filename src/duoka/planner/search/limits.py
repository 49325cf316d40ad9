"""Limits of a search: the device of each pinned block, and the number of devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementLimits:
    """Constraints on the devices of a placement.

    `pins` are pairs of a block's index in the chain and the index of the fleet's device that must
    run the block. `num_devices` is the number of devices to use; None leaves it to the search.
    """

    pins: tuple[tuple[int, int], ...] = ()
    num_devices: int | None = None

    def __bool__(self) -> bool:
        """Return True if blocks are pinned; `num_devices` doesn't count."""
        return bool(self.pins)

    @property
    def devices(self) -> frozenset[int]:
        """The devices of pinned blocks, which can't be exchanged for equal devices."""
        return frozenset(device for _, device in self.pins)

    def allow(self, num_blocks: int, device: int) -> npt.NDArray[np.bool_]:
        """Return True for the stages [start, stop) that the pins allow on a device.

        The result is [num_blocks + 1, num_blocks + 1], by start and stop.
        """
        # A stage [start, stop) has the pinned block b if start <= b < stop: on any other device the
        # rectangle of starts up to b and stops from b + 1 on is forbidden. Example: of four blocks
        # block 1 is pinned to cuda:0; on cuda:1 the stages [0, 2) to [0, 4) and [1, 2) to [1, 4)
        # are forbidden, [0, 1) and [2, 4) are allowed.
        allowed = np.ones((num_blocks + 1, num_blocks + 1), np.bool_)
        for block, pinned_device in self.pins:
            if pinned_device != device:
                allowed[: block + 1, block + 1 :] = False
        return allowed


NO_LIMITS = PlacementLimits()

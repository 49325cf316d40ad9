"""Limits: the device of pinned blocks, and the number of devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementLimits:
    """Demands on the devices of a placement.

    `pins` are blocks, each with the index of the fleet's device that it must be on. `num_devices`
    are to be used.
    """

    pins: tuple[tuple[int, int], ...] = ()
    num_devices: int | None = None

    def __bool__(self) -> bool:
        """True with pinned blocks."""
        return bool(self.pins)

    @property
    def devices(self) -> frozenset[int]:
        """The devices of pinned blocks, not exchangeable for equal ones."""
        return frozenset(device for _, device in self.pins)

    def allow(self, num_blocks: int, device: int) -> npt.NDArray[np.bool_]:
        """[num_blocks + 1, num_blocks + 1]: True for stages [start, stop) allowed on a device."""
        # A stage [start, stop) has the pinned block b if start <= b < stop: on any other device the
        # rectangle of starts up to b and stops from b + 1 on is forbidden. Example: of four blocks
        # block 1 is pinned to cuda:0; on cuda:1 the stages [0, 2) to [0, 4) and [1, 2) to [1, 4)
        # are forbidden, [0, 1) and [2, 4) are allowed.
        allowed = np.ones((num_blocks + 1, num_blocks + 1), np.bool_)
        for block, at in self.pins:
            if at != device:
                allowed[: block + 1, block + 1 :] = False
        return allowed


NO_LIMITS = PlacementLimits()

"""Constraints: a person's demands on a placement, beside its memory.

They are data, kept in a plan's request so that the plan can be made again. What the names mean is
found out where they are used: this module knows nothing of models or of devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from duoka.base.text import choose
from duoka.errors import UsageError

Strategy = Literal["auto", "balanced", "sequential"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

_SHOWN = 60
_LOW_FIRST = "balanced_low_0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Demands on a placement.

    Parameters
    ----------
    strategy : {"auto", "balanced", "sequential"}
        As few devices as hold the workload, and the best placement on so many for the objective;
        every device, with as large a share of headroom on each as can be on all; or the devices in
        the user's order, each filled as far as it goes before the next.
    pins : tuple of (str, str)
        Modules or tensors, in the model's names or its checkpoint's, with the device that each
        must be on.
    reserve : tuple of (str, int)
        Devices, with bytes that are taken off their budgets.
    offload : bool
        Whether weights may lie in the processor's memory where they fit no GPU.

    Raises
    ------
    UsageError
        If a pin stands twice, a number isn't positive, or the strategy is unknown.

    Examples
    --------
    >>> Constraints(pins=(("lm_head", "cuda:1"),)).demands
    True
    """

    strategy: Strategy = "auto"
    pins: tuple[tuple[str, str], ...] = ()
    reserve: tuple[tuple[str, int], ...] = ()
    offload: bool = False

    def __post_init__(self) -> None:
        choose("the strategy", self.strategy, STRATEGIES)
        devices: dict[str, str] = {}
        for name, device in self.pins:
            if devices.setdefault(name, device) != device:
                raise UsageError(
                    f"the pin of {name[:_SHOWN]} is given twice: {devices[name][:_SHOWN]} and "
                    f"{device[:_SHOWN]}",
                    hint="give it once",
                )
        for device, size in self.reserve:
            if size <= 0:
                raise UsageError(
                    f"the reserve of {device[:_SHOWN]} is {size} bytes",
                    hint="give the size to leave free, such as cuda:0=2GiB",
                )

    @property
    def demands(self) -> bool:
        """True if the place of modules is constrained."""
        return bool(self.pins) or self.strategy != "auto"


def strategy_of(device_map: object) -> Strategy | None:
    """Return the strategy of transformers' words for a device map; None for a map.

    "auto" is what accelerate leaves itself free to find best, and so is duoka's; "balanced" and
    "sequential" are the same in both.
    """
    word = device_map.strip().lower() if isinstance(device_map, str) else ""
    if word == _LOW_FIRST:
        raise UsageError(
            f"{_LOW_FIRST!r} keeps the first GPU free for generation, and duoka accounts for that "
            "memory on every GPU",
            hint='use "balanced"; --reserve cuda:0=4GiB leaves more memory free on the first',
        )
    return next((strategy for strategy in STRATEGIES if strategy == word), None)

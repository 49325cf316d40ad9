"""Constraints: the user's conditions for a placement, in addition to the memory of the devices.

A plan's request contains them, so that the plan can be made again. Names of modules and devices
are validated in `limits`, where the model and the fleet are known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from duoka.base.serialization import OMIT_DEFAULT
from duoka.base.text import choose
from duoka.errors import UsageError

Strategy = Literal["auto", "balanced", "sequential"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
Experts = Literal["auto", "gpu", "host"]
EXPERTS: tuple[Experts, ...] = get_args(Experts)
HostExperts = Literal["auto", "compute", "fetch"]
HOST_EXPERTS: tuple[HostExperts, ...] = get_args(HostExperts)

_SHOWN = 60
_LOW_FIRST = "balanced_low_0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """Conditions for a placement.

    Parameters
    ----------
    strategy : {"auto", "balanced", "sequential"}
        "auto" uses the fewest devices that hold the workload, with the best placement for the
        objective; "balanced" uses every device and maximizes the least headroom, as a share of the
        device's budget; "sequential" fills the devices in the user's order.
    pins : tuple of (str, str)
        Pairs of a module or tensor, by its name in the model or in the checkpoint, and the device
        that it must be on.
    reserve : tuple of (str, int)
        Pairs of a device and the bytes to subtract from its budget.
    offload : bool
        True to keep weights in CPU memory if they don't fit the GPUs.
    experts : {"auto", "gpu", "host"}
        "host" keeps all experts in host memory, where the CPU computes; "auto" keeps the experts of
        as few layers there as possible, if the host's memory is known; "gpu" keeps none there.
    host_experts : {"auto", "compute", "fetch"}
        "compute" lets the CPU compute experts in host memory; "fetch" lets the GPUs fetch them, and
        keep those used last; "auto" fetches if all GPUs read host memory faster than the CPU does.
    expert_cache : int, optional
        Bytes per GPU, on average, for the experts that it keeps; by default as many as fit.

    Raises
    ------
    UsageError
        If a name is pinned to two devices, a reserve isn't positive, or the strategy is unknown.

    Examples
    --------
    >>> Constraints(pins=(("lm_head", "cuda:1"),)).demands
    True
    """

    strategy: Strategy = "auto"
    pins: tuple[tuple[str, str], ...] = ()
    reserve: tuple[tuple[str, int], ...] = ()
    offload: bool = False
    experts: Experts = field(default="auto", metadata=OMIT_DEFAULT)
    host_experts: HostExperts = field(default="auto", metadata=OMIT_DEFAULT)
    expert_cache: int | None = field(default=None, metadata=OMIT_DEFAULT)

    def __post_init__(self) -> None:
        choose("the strategy", self.strategy, STRATEGIES)
        choose("the place of experts", self.experts, EXPERTS)
        choose("the way to use experts in host memory", self.host_experts, HOST_EXPERTS)
        if self.expert_cache is not None and self.host_experts != "fetch":
            raise UsageError(
                "a cache of experts is for experts that the GPUs fetch",
                hint="add --host-experts fetch, or omit --expert-cache",
            )
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
        """True if the constraints restrict where modules run: by pins or by a strategy."""
        return bool(self.pins) or self.strategy != "auto"


def strategy_of(device_map: object) -> Strategy | None:
    """Return the strategy for transformers' ``device_map="balanced"``; None for a map or device.

    "auto", "balanced" and "sequential" are duoka's strategies of the same names.
    """
    word = device_map.strip().lower() if isinstance(device_map, str) else ""
    if word == _LOW_FIRST:
        raise UsageError(
            f"{_LOW_FIRST!r} keeps the first GPU free for generation, and duoka accounts for that "
            "memory on every GPU",
            hint='use "balanced"; --reserve cuda:0=4GiB leaves more memory free on the first',
        )
    return next((strategy for strategy in STRATEGIES if strategy == word), None)

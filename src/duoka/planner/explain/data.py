"""The parts of an explanation.

Bytes are those that tensors request at the peak. Seconds are per request, or per training step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from duoka.base.serialization import to_dict

Outcome = Literal["impossible", "tight", "forbidden", "worse", "equal", "better"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a placement on one device, with its modules in execution order.

    `is_tight` is True if the share fits its budget, but leaves less than the recommended free
    memory, so that the planner doesn't choose it.
    """

    device: str
    modules: tuple[str, ...]
    requested_bytes: int
    budget_bytes: int
    is_tight: bool = False

    @property
    def holds(self) -> bool:
        """True if the share fits its device, with the recommended free memory if that is kept."""
        return self.headroom_bytes >= 0 and not self.is_tight

    @property
    def headroom_bytes(self) -> int:
        """The budget minus the requested bytes; negative if the share doesn't fit."""
        return self.budget_bytes - self.requested_bytes

    @property
    def is_fragmented(self) -> bool:
        """True if the bytes fit, but free memory is fragmented; recorded as one missing byte."""
        return self.headroom_bytes == -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryMove:
    """The effect of moving a block over the boundary between two stages, from `giver` to `taker`.

    `giver` and `taker` are the shares of both devices after the move, `modules` those of the block.
    The outcome is "forbidden" if a pin excludes the move, "impossible" if the placement doesn't fit
    after it, "tight" if less than the recommended free memory remains. Otherwise it compares the
    objective's `value` after the move with the plan's. `value` is None for a placement that doesn't
    fit or is tight.
    """

    giver: Share
    taker: Share
    modules: tuple[str, ...]
    outcome: Outcome
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fewer:
    """A lower bound of the bytes that are missing on one device less than the plan uses.

    `devices` are the largest ones of the fleet. The prefill chunk is the smallest one.
    """

    devices: tuple[str, ...]
    missing_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The reasons for a plan. `work` is the unit of seconds: a request, or in training a step.

    `objective`, `value` and `bound` are the plan's. They are bytes for "headroom" and "given" (a
    device map), the share of headroom in a budget for "balance", blocks on the first device for
    "order", seconds otherwise. `changes` are the effects of moving one block from a stage to its
    neighbour; empty if a device has several stages. `fewer` is None if the plan uses one device, if
    the request sets the devices (`use_all`, a strategy or pins), or if a search on one device less
    finds a placement. With `leaves_room` a placement counts as fitting only if every device keeps
    the recommended free memory.
    """

    work: Literal["request", "step"]
    objective: str
    value: float
    bound: float
    binding_device: str
    shares: tuple[Share, ...]
    leaves_room: bool = False
    changes: tuple[BoundaryMove, ...] = ()
    fewer: Fewer | None = None

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain dicts and lists for `json.dumps`."""
        data: dict[str, Any] = to_dict(self)
        return data

"""The parts of an explanation. Bytes are requested by tensors, seconds are per request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from duoka.base.serialization import to_dict

Outcome = Literal["impossible", "tight", "forbidden", "worse", "equal", "better"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a placement on a device, its modules in execution order.

    A tight share fits, and leaves too little free memory to be chosen.
    """

    device: str
    modules: tuple[str, ...]
    requested_bytes: int
    budget_bytes: int
    is_tight: bool = False

    @property
    def holds(self) -> bool:
        """True if the device has the memory, and the room that a plan leaves."""
        return self.headroom_bytes >= 0 and not self.is_tight

    @property
    def headroom_bytes(self) -> int:
        """The budget minus the requested bytes; negative if the share doesn't fit."""
        return self.budget_bytes - self.requested_bytes

    @property
    def is_fragmented(self) -> bool:
        """True if free bytes are too fragmented: recorded as a single byte too many."""
        return self.headroom_bytes == -1


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryMove:
    """A block moved over the boundary between two stages, and the shares of both devices then.

    The outcome is impossible where it doesn't fit; tight where it leaves too little room; forbidden
    by a pin; otherwise as the objective judges it, whose value is None
    where it doesn't fit or is tight.
    """

    giver: Share
    taker: Share
    modules: tuple[str, ...]
    outcome: Outcome
    value: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """The activations sent between two stages, and the seconds; None if unknown.

    It is `per` token: one decode step, on average, over the whole batch; per request where it has
    no such step; in training per step.
    """

    source: str
    target: str
    per: Literal["token", "request", "step"]
    num_bytes: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fewer:
    """The missing bytes, at least, on a device less, with the smallest prefill chunk."""

    devices: tuple[str, ...]
    missing_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Another placement for the same workload, or the plan's own; its shares in execution order.

    `value` is what the plan's objective makes of it, and `request_seconds` are from the request to
    the last token; both are None where it doesn't fit.
    """

    name: str
    shares: tuple[Share, ...]
    fits: bool
    value: float | None
    request_seconds: float | None
    is_plan: bool

    @property
    def least_headroom_bytes(self) -> int:
        """The headroom of the tightest device; negative if nothing fits."""
        return min(share.headroom_bytes for share in self.shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The reasons for a plan. `work` is the unit of seconds: a request, or in training a step.

    The objective is the plan's, "given" where a person wrote the map; `value` and `bound` are bytes
    for "headroom" and "given", the share of headroom in a budget for "balance", blocks on the first
    device for "order", else seconds. `changes` say what would come of moving a block from a stage
    to its neighbour; there are none where the placement isn't one stage for each device. `fewer` is
    None where it wasn't asked, or where one device is used. With `leaves_room` a placement is only
    compared where every device keeps the room that a plan leaves.
    """

    work: Literal["request", "step"]
    objective: str
    value: float
    bound: float
    binding_device: str
    shares: tuple[Share, ...]
    leaves_room: bool = False
    crossings: tuple[Crossing, ...] = ()
    changes: tuple[BoundaryMove, ...] = ()
    fewer: Fewer | None = None
    alternatives: tuple[Alternative, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain dicts and lists for `json.dumps`."""
        data: dict[str, Any] = to_dict(self)
        return data

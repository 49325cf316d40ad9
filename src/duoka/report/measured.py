"""Measurements of loading and generation, for comparison with the forecast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from duoka.forecast.forecast import Forecast
from duoka.forecast.stage_bytes import StageBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBytes:
    """Peak allocated and peak reserved bytes of a device, possibly at different times."""

    device: str
    allocated_bytes: int
    reserved_bytes: int


class Fallback(NamedTuple):
    """A feature that a device doesn't use, and the reason: a failed test at start, or a setting.

    FlashAttention over pages ("attention"): keys and values are gathered. Or CUDA graphs
    ("graphs"): the kernels of decode steps are launched one by one.
    """

    device: str
    unused: Literal["attention", "graphs"]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of loading and generation.

    `context_tokens` is the length of the longest prompt with its completion. `first_token_seconds`
    is the mean time to first token and `tokens_per_second` the decode speed; None if not timed.
    `expert_hits` is the share of chosen experts found in the GPUs' caches; None without caches.
    """

    devices: tuple[PeakBytes, ...]
    context_tokens: int = 0
    first_token_seconds: float | None = None
    tokens_per_second: float | None = None
    expert_hits: float | None = None

    def beside(self, forecast: Forecast) -> Iterator[tuple[PeakBytes, StageBytes]]:
        """Pair each measured device with its forecast."""
        stages = {stage.device: stage for stage in forecast.devices}
        return ((peaks, stages[peaks.device]) for peaks in self.devices)

    def to_dict(self, forecast: Forecast) -> dict[str, Any]:
        """Convert to a JSON-compatible dict, with the forecast of each measured device."""
        data = asdict(self)
        data["forecast"] = [asdict(stage) for _, stage in self.beside(forecast)]
        return data

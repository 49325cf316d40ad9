"""Measurements of loading and generation, for comparison with the forecast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from duoka.forecast.forecast import Forecast
from duoka.forecast.stage_bytes import StageBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBytes:
    """Peaks of the allocator of one device, not necessarily at the same time."""

    device: str
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of loading and generation.

    `context_tokens` is the longest prompt plus completion. `first_token_seconds` is the mean time
    to first token, `tokens_per_second` the decode speed; None if nothing was timed.
    """

    devices: tuple[PeakBytes, ...]
    context_tokens: int = 0
    first_token_seconds: float | None = None
    tokens_per_second: float | None = None

    def beside(self, forecast: Forecast) -> Iterator[tuple[PeakBytes, StageBytes]]:
        """Pair each device that has an allocator with its forecast."""
        stages = {stage.device: stage for stage in forecast.devices}
        return ((peaks, stages[peaks.device]) for peaks in self.devices)

    def to_dict(self, forecast: Forecast) -> dict[str, Any]:
        """Convert to a JSON-compatible dict."""
        data = asdict(self)
        data["forecast"] = [asdict(stage) for _, stage in self.beside(forecast)]
        return data

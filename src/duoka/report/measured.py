"""What loading and answering took, to be held against the forecast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from duoka.forecast.forecast import Forecast
from duoka.forecast.stage_bytes import StageBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBytes:
    """The peaks of one device's allocator; they need not be at the same moment."""

    device: str
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a model took while it was loaded and answered.

    The longest prompt and its answer had `context_tokens`. `first_token_seconds` are those of an
    answer on average, and `tokens_per_second` come after it; None where there was nothing to time.
    """

    devices: tuple[PeakBytes, ...]
    context_tokens: int = 0
    first_token_seconds: float | None = None
    tokens_per_second: float | None = None

    def beside(self, forecast: Forecast) -> Iterator[tuple[PeakBytes, StageBytes]]:
        """Each device that has an allocator, with its forecast."""
        stages = {stage.device: stage for stage in forecast.devices}
        return ((peaks, stages[peaks.device]) for peaks in self.devices)

    def to_dict(self, forecast: Forecast) -> dict[str, Any]:
        """The form that `json.dumps` takes."""
        data = asdict(self)
        data["forecast"] = [asdict(stage) for _, stage in self.beside(forecast)]
        return data

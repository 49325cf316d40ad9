"""Steps: chunks that are computed at once, and the outcome of each chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from duoka.forecast.serving import StepSize
from duoka.runtime.call.chunk import Chunk

from .request import TokenChoice
from .sampler import SamplingRow

Outcome = TokenChoice | Exception | None
"""The next token after a chunk; None within a prompt; or the reason why it can't be computed."""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """Chunks of different sequences that are computed at once; `number` identifies the step.

    With a `size` it has no chunks: padding is computed, to see whether there is memory.
    """

    number: int
    chunks: Sequence[Chunk]
    size: StepSize | None = None

    @property
    def rows(self) -> list[SamplingRow]:
        """The parameters of each row of logits by which its token is sampled."""
        return [chunk.row for chunk in self.chunks if chunk.row is not None]

"""What is computed at once: new tokens of some sequences, and what each of them comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from duoka.forecast.serving import StepSize
from duoka.models.text.image_prompts import ImagePrompt

from .request import TokenChoice
from .sampler import SamplingRow

Outcome = TokenChoice | Exception | None
"""What a chunk comes to: a token, nothing yet, or why it can't be computed."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of a sequence, from the place `start` on; `pages` are those of all its tokens.

    `row` says how the next token is chosen, if it can be chosen after these. A prompt with images
    is one chunk, which has them.
    """

    sequence: int
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    row: SamplingRow | None
    images: ImagePrompt | None = None

    @property
    def end(self) -> int:
        """The tokens of the sequence up to here."""
        return self.start + len(self.tokens)

    @property
    def wants_logits(self) -> bool:
        """Whether the next token is to be chosen after these."""
        return self.row is not None


@dataclass(frozen=True, slots=True)
class EngineStep:
    """Chunks of different sequences that are computed at once; `number` is this step's alone.

    With a `size` it has none: nobody's tokens are computed, to see whether there is memory.
    """

    number: int
    chunks: Sequence[Chunk]
    size: StepSize | None = None

    @property
    def rows(self) -> list[SamplingRow]:
        """How the tokens are chosen of which there are logits."""
        return [chunk.row for chunk in self.chunks if chunk.row is not None]

"""What the scheduler asks of an executor in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of a sequence, from the place `start` on; `pages` are those of all its tokens."""

    sequence: int
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    wants_logits: bool

    @property
    def end(self) -> int:
        """The tokens of the sequence up to here."""
        return self.start + len(self.tokens)

    @property
    def places(self) -> range:
        """Those of the new tokens in their sequence."""
        return range(self.start, self.end)

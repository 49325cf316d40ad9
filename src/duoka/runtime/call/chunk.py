"""Chunks of new tokens. A step computes chunks of several sequences at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from duoka.models.text.image_prompts import ImagePrompt


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of a sequence: a prefill chunk, or the token of a decode step.

    Parameters
    ----------
    sequence : int
        Number of the sequence.
    tokens : sequence of int
        The new tokens.
    start : int
        Position of the first new token in its sequence.
    pages : sequence of int
        Block table of the sequence: the page of each `page_tokens` tokens of it.
    row : optional
        Parameters by which the next token is sampled after this chunk (`engine.sampler`); None
        where the chunk ends before its prompt does, and no logits are needed.
    images : ImagePrompt, optional
        The whole prompt, where it has images: it is one chunk then.
    """

    sequence: int
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    row: Any
    images: ImagePrompt | None = None

    @property
    def end(self) -> int:
        """Position behind the last new token."""
        return self.start + len(self.tokens)

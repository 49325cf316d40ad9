"""Chunks of new tokens, of which a step computes several at once, one per sequence."""

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
        The new tokens. The number -1 - r is the token that the step before this one samples for its
        row r of logits, and which the host doesn't know yet.
    start : int
        Position of the first new token in its sequence.
    pages : sequence of int
        Block table of the sequence: the page for each `page_tokens` of its tokens.
    row : optional
        Parameters by which the next token is sampled after this chunk (`engine.sampler`). None if
        no token follows yet, since the prompt goes on after this chunk.
    images : ImagePrompt, optional
        The whole prompt, if it has images: it is then a single chunk.
    adapter : int
        Number of the sequence's adapter, from 1; 0 for none.
    """

    sequence: int
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    row: Any
    images: ImagePrompt | None = None
    adapter: int = 0

    @property
    def end(self) -> int:
        """The position after the last new token."""
        return self.start + len(self.tokens)

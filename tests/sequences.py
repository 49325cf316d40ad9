"""Sequences of the engine without text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from duoka.engine.request import SamplingParams
from duoka.engine.sequence import Sequence


class NoText:
    """In the place of a detokenizer."""

    def add(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def sequence_of(prompt: Iterable[int], max_new_tokens: int = 3, **options: Any) -> Sequence:
    """Make a sequence whose text is of no interest."""
    settings: dict[str, Any] = {
        "params": SamplingParams(seed=0, max_new_tokens=max_new_tokens),
        "stop_ids": (),
        "detokenizer": NoText(),
    }
    return Sequence([*prompt], **{**settings, **options})

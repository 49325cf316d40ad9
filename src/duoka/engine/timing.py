"""Measure the speed of generations."""

from __future__ import annotations

from collections.abc import Sequence

from duoka.models.quantization.expert_cache import COUNTS
from duoka.report.measured import Measured, PeakBytes

from .request import Completion


def measured(answers: Sequence[Completion], peaks: Sequence[PeakBytes]) -> Measured:
    """Summarize the speed of generations; `peaks` are the peak memory of a closed engine.

    Seconds and rates are None if no generation has produced a token.
    """
    started = [(a, a.first_token_at) for a in answers if a.first_token_at is not None]
    waits = [start - answer.asked_at for answer, start in started]
    # `seconds`: the length of the union of the intervals from first token to end.
    seconds, until = 0.0, float("-inf")
    for start, end in sorted((start, answer.ended_at) for answer, start in started):
        seconds += max(0.0, end - max(start, until))
        until = max(until, end)
    tokens = sum(max(0, len(answer.tokens) - 1) for answer, _ in started)
    chosen = COUNTS.total()
    return Measured(
        devices=tuple(peaks),
        context_tokens=max((a.prompt_tokens + len(a.tokens) for a in answers), default=0),
        first_token_seconds=sum(waits) / len(waits) if waits else None,
        tokens_per_second=tokens / seconds if seconds and tokens else None,
        expert_hits=COUNTS["hits"] / chosen if chosen else None,
    )

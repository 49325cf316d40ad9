"""How fast answers came."""

from __future__ import annotations

from collections.abc import Sequence

from duoka.report.measured import Measured, PeakBytes

from .request import Completion


def measured(answers: Sequence[Completion], peaks: Sequence[PeakBytes]) -> Measured:
    """What there is to say of answers, with the peaks of an engine that has been closed."""
    begun = [(answer, answer.first_token_at) for answer in answers if answer.tokens]
    waits = [first - answer.asked_at for answer, first in begun if first is not None]
    # Those that came at the same time share the seconds.
    seconds, until = 0.0, float("-inf")
    for first, last in sorted((first or 0.0, answer.ended_at) for answer, first in begun):
        seconds += max(0.0, last - max(first, until))
        until = max(until, last)
    tokens = sum(len(answer.tokens) - 1 for answer, _ in begun)
    return Measured(
        devices=tuple(peaks),
        context_tokens=max((a.prompt_tokens + len(a.tokens) for a in answers), default=0),
        first_token_seconds=sum(waits) / len(waits) if waits else None,
        tokens_per_second=tokens / seconds if seconds and tokens else None,
    )

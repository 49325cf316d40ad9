"""Probe sizes: the steps to record for the rules of a profile.

They cover each phase at more sizes than a rule has coefficients. What a step does is unknown here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from duoka.forecast.profile import ALIGNED_TOKENS, Phase


class ProbeRun(NamedTuple):
    """Steps over a cache: phases with their query tokens; None only fills the cache."""

    batch: int
    steps: tuple[tuple[Phase | None, int], ...]

    def aligned(self) -> ProbeRun:
        """Return a similar run at multiples of `ALIGNED_TOKENS`, in its decode step too."""
        (phase, tokens), *rest, last_step = self.steps
        aligned = _ceiled(tokens)
        steps = ((phase, aligned), *rest, (None, ALIGNED_TOKENS - 1), last_step)
        return ProbeRun(self.batch, steps)


# How many tokens past a multiple of `ALIGNED_TOKENS` the runs of one range begin: different ones,
# none aligned, nor after one token more.
_ODD = (1, 3, 4, 6)


def plain_runs(is_batched: bool, start: int, stop: int) -> Iterator[ProbeRun]:
    """Yield the runs to record: for each phase more samples than its rules have coefficients."""
    low = _ceiled(start + 1)
    step = _floored((stop - low) // 11)
    # Prefills of 0, 2, 5 and 7 elevenths of the range, each followed by chunks of so many: q, k and
    # qk have to be linearly independent over the samples of each phase. In a full window rules have
    # one coefficient more.
    plans = ((0, (1, 3)), (2, (2,)), (5, (3, 2) if start else (3,)), (7, (1,)))
    for batch in (2, 3) if is_batched else (1,):
        for (past, queries), odd in zip(plans, _ODD, strict=True):
            steps: list[tuple[Phase, int]] = [("prefill", low + past * step + odd)]
            steps += [("extend", tokens * step) for tokens in queries]
            yield ProbeRun(batch, (*steps, ("decode", 1)))


def image_runs(runs: Sequence[ProbeRun], least_tokens: int) -> Iterator[ProbeRun]:
    """Yield the runs with tokens for images in the first step, the whole prompt."""
    for run in runs:
        (phase, tokens), *_, last_step = run.steps
        yield run._replace(steps=((phase, tokens + _ceiled(least_tokens)), last_step))


def crossing_runs(
    is_batched: bool, earlier: tuple[int, int], later: tuple[int, int]
) -> Iterator[ProbeRun]:
    """Yield runs with a step from the first range into the second."""
    low, width = _ceiled(earlier[0] + 1), _floored((earlier[1] - earlier[0]) // 8)
    first_key, step = _ceiled(later[0] + 1), _floored((later[1] - later[0]) // 8)
    ends = ((0, 1), (2, 0), (4, 4), (6, 2), (5, 5), (1, 3))
    for batch in (2, 3) if is_batched else (1,):
        for (past, keys), odd in zip(ends, (*_ODD, 2, 5), strict=True):
            begin = low + past * width + odd
            tokens = first_key + keys * step - low - past * width
            yield ProbeRun(batch, (("prefill", begin), ("extend", tokens), ("decode", 1)))


def _ceiled(tokens: int) -> int:
    return -(-tokens // ALIGNED_TOKENS) * ALIGNED_TOKENS


def _floored(tokens: int) -> int:
    return max(tokens // ALIGNED_TOKENS, 1) * ALIGNED_TOKENS

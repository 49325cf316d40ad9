"""Probe sizes: the steps to record for the rules of a profile.

The steps cover each phase at more sizes than a rule has coefficients. This module knows only the
sizes of steps, not how a step runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from duoka.forecast.profile import ALIGNED_TOKENS, Phase


class ProbeRun(NamedTuple):
    """Steps over one cache as (phase, query tokens); a step of phase None only fills the cache."""

    batch: int
    steps: tuple[tuple[Phase | None, int], ...]

    def aligned(self) -> ProbeRun:
        """Return a similar run with numbers of keys that are multiples of `ALIGNED_TOKENS`."""
        (phase, tokens), *rest, last_step = self.steps
        aligned = _round_up(tokens)
        steps = ((phase, aligned), *rest, (None, ALIGNED_TOKENS - 1), last_step)
        return ProbeRun(self.batch, steps)


# The offsets of the runs of one range from a multiple of `ALIGNED_TOKENS`: all different, none
# aligned, and none aligned after one more token.
_ODD = (1, 3, 4, 6)


def plain_runs(is_batched: bool, start: int, stop: int) -> Iterator[ProbeRun]:
    """Yield the runs within one range: for each phase more samples than rules have coefficients."""
    low = _round_up(start + 1)
    step = _round_down((stop - low) // 11)
    # Prefills of 0, 2, 5 and 7 elevenths of the range, each followed by chunks of the given numbers
    # of elevenths: q, k and qk must be linearly independent over the samples of each phase. Behind
    # a sliding window (start > 0) rules have one coefficient more.
    plans = ((0, (1, 3)), (2, (2,)), (5, (3, 2) if start else (3,)), (7, (1,)))
    for batch in (2, 3) if is_batched else (1,):
        for (past, queries), odd in zip(plans, _ODD, strict=True):
            steps: list[tuple[Phase, int]] = [("prefill", low + past * step + odd)]
            steps += [("extend", tokens * step) for tokens in queries]
            yield ProbeRun(batch, (*steps, ("decode", 1)))


def image_runs(runs: Sequence[ProbeRun], least_tokens: int) -> Iterator[ProbeRun]:
    """Yield the runs with image tokens added to the first step, and without steps in the middle."""
    for run in runs:
        (phase, tokens), *_, last_step = run.steps
        yield run._replace(steps=((phase, tokens + _round_up(least_tokens)), last_step))


def crossing_runs(
    is_batched: bool, earlier: tuple[int, int], later: tuple[int, int]
) -> Iterator[ProbeRun]:
    """Yield runs with a step from the earlier range into the later one."""
    low, width = _round_up(earlier[0] + 1), _round_down((earlier[1] - earlier[0]) // 8)
    first_key, step = _round_up(later[0] + 1), _round_down((later[1] - later[0]) // 8)
    ends = ((0, 1), (2, 0), (4, 4), (6, 2), (5, 5), (1, 3))
    for batch in (2, 3) if is_batched else (1,):
        for (past, keys), odd in zip(ends, (*_ODD, 2, 5), strict=True):
            begin = low + past * width + odd
            tokens = first_key + keys * step - low - past * width
            yield ProbeRun(batch, (("prefill", begin), ("extend", tokens), ("decode", 1)))


def _round_up(tokens: int) -> int:
    """Round up to a multiple of `ALIGNED_TOKENS`."""
    return -(-tokens // ALIGNED_TOKENS) * ALIGNED_TOKENS


def _round_down(tokens: int) -> int:
    """Round down to a multiple of `ALIGNED_TOKENS`, but at least to that number."""
    return max(tokens // ALIGNED_TOKENS, 1) * ALIGNED_TOKENS

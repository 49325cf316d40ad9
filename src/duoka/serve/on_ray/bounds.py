"""Bounds: how many replicas there may be, and how they are dealt to the kinds of nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from duoka.errors import InfeasibleError, UsageError

_NUMBERS = re.compile(r"([1-9]\d{0,3})(?:-([1-9]\d{0,3}))?", re.ASCII)


def read_bounds(text: str | None) -> tuple[int, int] | None:
    """Read ``N`` or ``MIN-MAX``; None for ``auto``, and for nothing: as many as fit."""
    if text in (None, "auto"):
        return None
    match = _NUMBERS.fullmatch(text or "")
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if low > high:
        raise UsageError(
            f"{text!r:.40} is no number of replicas",
            hint='write a number, two as in 2-6, or "auto" for as many as fit',
        )
    return low, high


def deal(bounds: tuple[int, int] | None, room: Sequence[int]) -> list[tuple[int, int]]:
    """The least and the most replicas of each kind of nodes, which have room for so many.

    Each kind has one in turn. A kind that has any has one at least: where none runs, nothing tells
    that one is wanted. What there is no room for is for nodes of the first kind that come later.
    """
    low, high = bounds or (sum(room), sum(room))
    if low > sum(room):
        raise InfeasibleError(
            f"{low} replicas don't fit these nodes; {sum(room)} do",
            hint=f"--replicas {sum(room)}, or more nodes",
        )
    most = _in_turn(high, room)
    most[0] += high - sum(most)
    num_kinds = sum(map(bool, most))
    if low < num_kinds:
        raise UsageError(
            f"there are {num_kinds} kinds of nodes, and each has one replica at least",
            hint=f"--replicas {num_kinds}-{high}",
        )
    return list(
        zip(_in_turn(low, [min(pair) for pair in zip(most, room, strict=True)]), most, strict=True)
    )


def _in_turn(number: int, room: Sequence[int]) -> list[int]:
    dealt = [0] * len(room)
    for _ in range(min(number, sum(room))):
        free = [kind for kind, count in enumerate(dealt) if count < room[kind]]
        dealt[min(free, key=dealt.__getitem__)] += 1
    return dealt

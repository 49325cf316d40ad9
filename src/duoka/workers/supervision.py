"""Supervision of workers: restarts after a loss, and detection of silent workers."""

from __future__ import annotations

import time
from collections import deque

LOOK_SECONDS, SILENT_SECONDS = 0.5, 60.0
"""Seconds between two checks of a worker, and seconds of silence after which it counts as lost.

A worker responds within a second; the limit is longer so that a swapping machine isn't given up.
"""
MAX_LOSSES, LOSSES_SECONDS = 3, 600.0
"""A worker is not restarted after so many losses within so many seconds."""
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 1.0, 30.0


class RestartPolicy:
    """Decides whether and after how many seconds a lost worker is restarted.

    The delay doubles from 1 to 30 seconds, and starts again from 1 after a worker that lived for
    more than ten minutes. After the third loss within ten minutes, there is no restart.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        self._delay = _FIRST_DELAY_SECONDS

    def delay_after_loss(self, lived_seconds: float) -> float | None:
        """Count a loss; return the seconds to wait before the restart, or None to give up.

        `lived_seconds` is how long the lost worker ran.
        """
        self._losses.append(time.monotonic())
        if len(self._losses) == MAX_LOSSES and self._losses[-1] - self._losses[0] < LOSSES_SECONDS:
            return None
        if lived_seconds > LOSSES_SECONDS:
            self._delay = _FIRST_DELAY_SECONDS
        delay, self._delay = self._delay, min(2 * self._delay, _LONGEST_DELAY_SECONDS)
        return delay


class SilenceCounter:
    """Measures for how long a worker has given no sign of life.

    Counts checks instead of reading a clock, since the supervising process may have been suspended.
    """

    def __init__(self, look_seconds: float = LOOK_SECONDS) -> None:
        self._look_seconds = look_seconds
        self.seconds = 0.0

    def count(self, *, is_alive: bool) -> float:
        """Count a check, at which the worker was alive or not; return the seconds of silence."""
        self.seconds = 0.0 if is_alive else self.seconds + self._look_seconds
        return self.seconds

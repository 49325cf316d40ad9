"""Supervision of workers: restarts after a loss, and the limit of silence."""

from __future__ import annotations

import time
from collections import deque

LOOK_SECONDS, SILENT_SECONDS = 0.5, 60.0
"""Seconds between two looks at a worker, and seconds of silence after which it is lost.

A worker needs a second at most to answer, but a machine that swaps is slow and not dead.
"""
MAX_LOSSES, LOSSES_SECONDS = 3, 600.0
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 1.0, 30.0


class RestartPolicy:
    """Decides about the restart of a lost worker, and its delay.

    The delay doubles from 1 to 30 seconds. The third loss within ten minutes is the last.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=MAX_LOSSES)
        self._delay = _FIRST_DELAY_SECONDS

    def delay_after_loss(self, lived_seconds: float) -> float | None:
        """Count a loss; return the seconds until the next start, or None to give up."""
        self._losses.append(time.monotonic())
        if len(self._losses) == MAX_LOSSES and self._losses[-1] - self._losses[0] < LOSSES_SECONDS:
            return None
        if lived_seconds > LOSSES_SECONDS:
            self._delay = _FIRST_DELAY_SECONDS
        delay, self._delay = self._delay, min(2 * self._delay, _LONGEST_DELAY_SECONDS)
        return delay


class SilenceCounter:
    """Measures how long a worker has shown no sign of life.

    Looks are counted and not seconds: the watching process may have been stopped as well.
    """

    def __init__(self, look_seconds: float = LOOK_SECONDS) -> None:
        self._look_seconds = look_seconds
        self.seconds = 0.0

    def count(self, *, is_alive: bool) -> float:
        """Count a look; return the seconds of silence so far."""
        self.seconds = 0.0 if is_alive else self.seconds + self._look_seconds
        return self.seconds

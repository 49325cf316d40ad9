"""Signal handlers for the time that workers run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], object], signums: Iterable[int]
) -> Iterator[None]:
    """Handle signals with `handler` inside the block; restore the former handlers at its end.

    Signals that the process ignores stay ignored. Does nothing outside the main thread, since only
    the main thread can set handlers.
    """
    former = {}
    if threading.current_thread() is threading.main_thread():
        for signum in signums:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                former[signum] = signal.signal(signum, handler)
    try:
        yield
    finally:
        for signum, previous in former.items():
            signal.signal(signum, previous)

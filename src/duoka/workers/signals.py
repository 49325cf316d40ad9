"""Handlers of signals for as long as workers run."""

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
    """Install a handler of signals, and restore the handlers before at the end.

    A signal that this process was started to ignore stays ignored. Does nothing outside the main
    thread, which alone receives signals.
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

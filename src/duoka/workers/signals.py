"""Handlers of signals for as long as workers run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def handle_signals(handle: Callable[[int], object], signums: Iterable[int]) -> Iterator[None]:
    """Call a function with each signal that comes, and restore the handlers before at the end.

    A signal that this process was started to ignore stays ignored. Does nothing in another thread
    than the main one, whose the signals are.
    """
    former = {}
    if threading.current_thread() is threading.main_thread():
        for signum in signums:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                former[signum] = signal.signal(signum, lambda number, _: handle(number))
    try:
        yield
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)

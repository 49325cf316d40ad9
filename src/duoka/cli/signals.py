"""Ctrl-C and other signals that end the program: each ends it once, and its clean-up is left alone.

What Python forgets, it isn't asked for: where a library catches the exception and goes on, the
signal has to be sent again.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

# For so long after a signal another one is taken for the same wish, and can't stop the clean-up.
_PATIENCE_SECONDS = 2.0
_SOON_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """The program was asked to end: SIGTERM, or SIGHUP because its terminal has gone."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class _Handler:
    """What Python calls for a signal."""

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._raised_at = 0.0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        is_other = signum != signal.SIGINT and self.stopped_by == signal.SIGINT
        is_late = time.monotonic() - self._raised_at > _PATIENCE_SECONDS
        if self.stopped_by is None or is_other or is_late:
            self.stopped_by, self._raised_at = signum, time.monotonic()
            raise KeyboardInterrupt if signum == signal.SIGINT else Terminated(signum)

    def raise_again(self) -> None:
        """Send the signal once more, when what runs now is over."""
        signum, self.stopped_by = self.stopped_by or signal.SIGINT, None
        thread = threading.main_thread().ident
        timer = threading.Timer(_SOON_SECONDS, signal.pthread_kill, (thread, signum))
        timer.daemon = True
        timer.start()


def install() -> None:
    """Take over the signals that end the program, but for those that its parent had ignored."""
    handler = _Handler()
    for signum in _SIGNALS:
        if signal.getsignal(signum) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(signum, handler)
    sys.unraisablehook = _unraisable(handler, sys.unraisablehook)


def _unraisable(handler: _Handler, otherwise: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What Python calls for an exception in a finaliser, which goes no further."""

    def hook(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt | Terminated):
            handler.raise_again()
        elif handler.stopped_by is None:  # others follow from the signal's own
            otherwise(unraisable)

    return hook


def taken() -> None:
    """Let the next signal be raised: the program goes on after this one."""
    handler = _installed()
    if handler is not None:
        handler.stopped_by = None


def ignore() -> None:
    """Let no signal change the exit code any more: the program is ending."""
    # Not blocked, which holds for one thread only; and Python leaves what is ignored ignored when
    # it puts everything else back at its end.
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def stopped_by() -> int | None:
    """The signal that is ending the program; None if none is."""
    handler = _installed()
    return handler.stopped_by if handler is not None else None


def _installed() -> _Handler | None:
    handlers = (signal.getsignal(signum) for signum in _SIGNALS)
    return next((handler for handler in handlers if isinstance(handler, _Handler)), None)

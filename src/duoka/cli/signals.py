"""Ctrl-C and other signals end the program, once each; its clean-up is left alone."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

# For so long after a signal another one is taken for the same wish, and can't stop the clean-up.
_PATIENCE_SECONDS = 2.0
_AGAIN_SECONDS = 0.05
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
        if _imports_torch(frame):
            threading.Timer(_AGAIN_SECONDS, os.kill, (os.getpid(), signum)).start()
            return
        is_late = time.monotonic() - self._raised_at > _PATIENCE_SECONDS
        if self.stopped_by is None or is_late:
            self.stopped_by, self._raised_at = signum, time.monotonic()
            raise KeyboardInterrupt if signum == signal.SIGINT else Terminated(signum)


def _imports_torch(frame: FrameType | None) -> bool:
    """Whether torch is being imported: its C++ code there ends the process if Python raises."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "<module>" and name.partition(".")[0] == "torch":
            return True
        frame = frame.f_back
    return False


def install() -> None:
    """Take over the signals that end the program, but for those that its parent had ignored."""
    handler = _Handler()
    for signum in _SIGNALS:
        if signal.getsignal(signum) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(signum, handler)


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

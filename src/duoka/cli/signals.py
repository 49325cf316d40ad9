"""Ctrl-C and other signals end the program, once each; its clean-up is left alone."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

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
    """Python's handler for a signal."""

    # The first signal raises, and the exception unwinds the program. Until `_PATIENCE_SECONDS`
    # later further ones are ignored, so that an impatient second Ctrl-C doesn't interrupt the
    # clean-up; a later one raises again. `stopped_by` holds the signal until `forget`, and gives
    # the exit code also where a library has turned the exception into another one.

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._raised_at = 0.0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if _would_be_lost(frame):
            _send_later(signum)
            return
        is_late = time.monotonic() - self._raised_at > _PATIENCE_SECONDS
        if self.stopped_by is None or is_late:
            self.stopped_by, self._raised_at = signum, time.monotonic()
            raise KeyboardInterrupt if signum == signal.SIGINT else Terminated(signum)

    def hear(self, unraisable: Any) -> None:
        """Send a signal again whose exception Python drops; see `sys.unraisablehook`."""
        error = unraisable.exc_value
        if isinstance(error, (KeyboardInterrupt, Terminated)):
            self.stopped_by = None
            _send_later(getattr(error, "signum", signal.SIGINT))
        else:
            sys.__unraisablehook__(unraisable)


def _would_be_lost(frame: FrameType | None) -> bool:
    """Return True if an exception of a handler would get lost, or break the program.

    Python drops what a destructor raises and leaves its work half done; asyncio does the same to
    what a callback raises; and the C++ code of torch ends the process if its import fails.
    """
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        is_import = name == "<module>" and module.partition(".")[0] == "torch"
        if is_import or name == "__del__" or (module, name) == ("asyncio.events", "_run"):
            return True
        frame = frame.f_back
    return False


def _send_later(signum: int) -> None:
    """Send a signal to this process a moment later."""

    def send() -> None:
        time.sleep(_AGAIN_SECONDS)
        os.kill(os.getpid(), signum)

    # Not a `threading.Thread`: the handler may have interrupted code that holds threading's locks.
    _thread.start_new_thread(send, ())


def install() -> None:
    """Handle the signals for ending the program, except signals ignored by its parent."""
    handler = _Handler()
    for signum in _SIGNALS:
        if signal.getsignal(signum) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(signum, handler)
    sys.unraisablehook = handler.hear


def forget() -> None:
    """Forget the current signal: the program goes on."""
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
    """Return the signal behind the end of the program, if any."""
    handler = _installed()
    return handler.stopped_by if handler is not None else None


def _installed() -> _Handler | None:
    handlers = (signal.getsignal(signum) for signum in _SIGNALS)
    return next((handler for handler in handlers if isinstance(handler, _Handler)), None)

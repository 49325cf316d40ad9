"""Signal handling: a signal ends the program once, and repeats don't interrupt the clean-up."""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

# Further signals are ignored for this time, so that they don't interrupt the clean-up.
_IGNORE_SECONDS = 2.0
_RESEND_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Terminated(BaseException):
    """Raised by SIGTERM, and by SIGHUP, which means that the terminal was closed."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class _Handler:
    """Handler of all signals that end the program."""

    # The first signal raises an exception, which unwinds the program. For `_IGNORE_SECONDS` further
    # signals are ignored, so that a second Ctrl-C doesn't interrupt the clean-up; after this time a
    # signal raises again. `stopped_by` stores the signal until `forget` is called: it determines
    # the exit code even if a library turned the exception into another error.

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self._raised_at = 0.0

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if _would_be_lost(frame):
            _send_later(signum)
            return
        is_late = time.monotonic() - self._raised_at > _IGNORE_SECONDS
        if self.stopped_by is None or is_late:
            self.stopped_by, self._raised_at = signum, time.monotonic()
            raise KeyboardInterrupt if signum == signal.SIGINT else Terminated(signum)

    def hear(self, unraisable: Any) -> None:
        """Resend a signal whose exception Python dropped; installed as `sys.unraisablehook`."""
        error = unraisable.exc_value
        if isinstance(error, (KeyboardInterrupt, Terminated)):
            self.stopped_by = None
            _send_later(getattr(error, "signum", signal.SIGINT))
        else:
            sys.__unraisablehook__(unraisable)


def _would_be_lost(frame: FrameType | None) -> bool:
    """Return True if an exception raised at this frame would be dropped or crash the program.

    Python drops exceptions of a destructor, which is left half done; asyncio drops exceptions of a
    callback; and the C++ code of torch ends the process if torch's import fails.
    """
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        is_import = name == "<module>" and module.partition(".")[0] == "torch"
        if is_import or name == "__del__" or (module, name) == ("asyncio.events", "_run"):
            return True
        frame = frame.f_back
    return False


def _send_later(signum: int) -> None:
    """Send a signal to this process after a short delay."""

    def send() -> None:
        time.sleep(_RESEND_SECONDS)
        os.kill(os.getpid(), signum)

    # Not a `threading.Thread`: the interrupted code may hold locks of the threading module.
    _thread.start_new_thread(send, ())


def install() -> None:
    """Install the handler for SIGINT, SIGTERM and SIGHUP, except those ignored by the parent."""
    handler = _Handler()
    for signum in _SIGNALS:
        if signal.getsignal(signum) in (signal.default_int_handler, signal.SIG_DFL):
            signal.signal(signum, handler)
    sys.unraisablehook = handler.hear


def forget() -> None:
    """Clear the stored signal, because the program continues."""
    handler = _find_handler()
    if handler is not None:
        handler.stopped_by = None


def ignore() -> None:
    """Ignore all signals while the program ends, so that none changes the exit code."""
    # Ignored and not blocked: blocking applies to one thread only. Python's finalization restores
    # other handlers, but keeps ignored signals ignored.
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)


def stopped_by() -> int | None:
    """Return the signal that is ending the program; None without one."""
    handler = _find_handler()
    return handler.stopped_by if handler is not None else None


def _find_handler() -> _Handler | None:
    """Return the installed handler; None before `install` or after `ignore`."""
    handlers = (signal.getsignal(signum) for signum in _SIGNALS)
    return next((handler for handler in handlers if isinstance(handler, _Handler)), None)

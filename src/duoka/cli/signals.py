"""Ctrl-C and other signals that end the program, so that none is lost and none leaves a mess.

Python alone has three gaps. A signal that comes just before a blocking call waits until that call
returns; one whose exception is raised in a finaliser, or in a library that catches everything, is
forgotten; and a second one interrupts the clean-up after the first. Here a thread repeats a signal
that nobody took, and after the first one the next waits until the program listens again.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

# How long a clean-up may take before another Ctrl-C ends the program without it.
_PATIENCE_SECONDS = 5.0
# A signal that Python noted is taken within this time, unless the main thread is in a long call.
_TAKEN_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_SHOW_CURSOR = b"\x1b[?25h"
_WATCHER = "duoka-signals"


class Terminated(BaseException):
    """The program was asked to end: SIGTERM, or SIGHUP because its terminal has gone."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class _Noticed:
    """Of an exception that notices when somebody else caught it and went on."""

    handler: _Handler
    signum: int

    def __del__(self) -> None:
        self.handler.repeat_unless_taken(self.signum)


class _Interrupt(_Noticed, KeyboardInterrupt):
    pass


class _Terminated(_Noticed, Terminated):
    pass


class _Handler:
    """What Python calls for a signal. It raises once, then no more until somebody listens."""

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self.taken = False
        self._listens = True
        self._waiting: int | None = None
        self._deaf_since = 0.0
        self._terminal = _terminal_settings()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._drain()  # tells the watcher that the signal was taken
        if self._listens:
            self._raise(signum)
        if time.monotonic() - self._deaf_since > _PATIENCE_SECONDS:
            self._end(signum)
        self._waiting = signum

    def listen(self) -> None:
        """Let signals be raised again; raise the one that waits."""
        self.stopped_by, self._listens = None, True
        if self._waiting is not None:
            signum, self._waiting = self._waiting, None
            self._raise(signum)

    def be_deaf(self) -> None:
        """Let signals wait."""
        if self._listens:
            self._listens, self._deaf_since = False, time.monotonic()

    def watch(self) -> None:
        """Begin to repeat signals that Python has noted and nobody has taken."""
        main = threading.main_thread().ident
        assert main is not None
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._repeat, args=(main,), name=_WATCHER, daemon=True).start()

    def repeat_unless_taken(self, signum: int) -> None:
        """Raise a signal again whose exception did not get through."""
        if not self.taken:
            self._listens = True
            with suppress(OSError):
                os.write(self._write, bytes([signum]))

    def _raise(self, signum: int) -> None:
        self.be_deaf()
        self.stopped_by, self.taken = signum, False
        error = _Interrupt() if signum == signal.SIGINT else _Terminated(signum)
        error.handler, error.signum = self, signum
        try:
            raise error
        finally:
            del error  # or its traceback, which holds this frame, would keep it alive

    def _drain(self) -> bytes:
        with suppress(BlockingIOError):
            return os.read(self._read, 512)
        return b""

    def _repeat(self, main: int) -> None:
        pause = _TAKEN_SECONDS
        while True:
            select.select([self._read], [], [])
            time.sleep(pause)
            noted = self._drain()
            if noted:
                signal.pthread_kill(main, noted[-1])
            pause = min(pause * 2, _LONGEST_PAUSE_SECONDS) if noted else _TAKEN_SECONDS

    def _end(self, signum: int) -> None:
        if self._terminal is not None:
            with suppress(termios.error):
                termios.tcsetattr(0, termios.TCSANOW, self._terminal)
        with suppress(OSError):
            os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + b"stopped\n")
        os._exit(128 + signum)


def _terminal_settings() -> list[Any] | None:
    try:
        return termios.tcgetattr(0)
    except (termios.error, OSError):
        return None


def install() -> None:
    """Take over the signals that end the program, but for those that its parent had ignored."""
    handler = _Handler()
    for signum, default in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(signum) == default:
            signal.signal(signum, handler)
    handler.watch()
    sys.unraisablehook = _unraisable(handler, sys.unraisablehook)


def _unraisable(handler: _Handler, otherwise: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """What Python calls for an exception in a finaliser, which goes no further."""

    def hook(told: Any) -> None:
        if handler.stopped_by is None:  # a signal's own is repeated, and others follow from it
            otherwise(told)

    return hook


def taken() -> None:
    """Tell that the exception of a signal has come to where it should."""
    handler = _installed()
    if handler is not None:
        handler.taken = True


def ignore() -> None:
    """Let no signal change the exit code any more: the program is ending."""
    # Not blocked, which holds for one thread only; and Python leaves what is ignored ignored when
    # it puts everything else back at its end.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)


def stopped_by() -> int | None:
    """The signal that is ending the program; None if none is."""
    handler = _installed()
    return handler.stopped_by if handler is not None else None


@contextmanager
def deferring() -> Iterator[None]:
    """A scope in which signals wait until `listening`."""
    handler = _installed()
    if handler is not None:
        handler.be_deaf()
    yield


@contextmanager
def listening() -> Iterator[None]:
    """A scope within `deferring` that a signal interrupts."""
    handler = _installed()
    try:
        if handler is not None:
            handler.listen()
        yield
    finally:
        if handler is not None:
            handler.be_deaf()


def has_stray_threads() -> bool:
    """Whether threads are left that the interpreter's end could catch in the middle of a step."""
    known = {threading.main_thread().name, _WATCHER}
    return any(thread.name not in known for thread in threading.enumerate())


def _installed() -> _Handler | None:
    for signum in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(signum)
        if isinstance(handler, _Handler):
            return handler
    return None

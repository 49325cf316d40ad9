"""Progress: what a long call is doing, said to whoever shows it; it knows nothing of terminals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]

_listener: ContextVar[Listener | None] = ContextVar("duoka_progress", default=None)


def say(text: str) -> None:
    """Say in a few words what begins now; without a listener it goes nowhere."""
    listener = _listener.get()
    if listener is not None:
        listener(text)


def say_import(library: str) -> None:
    """Say that a library is imported, where that is still to come: some take seconds."""
    if library not in sys.modules:
        say(f"importing {library}")


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """A scope in which what is said is passed to a listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)

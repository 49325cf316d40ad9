"""Progress messages of long calls, passed to a listener such as a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]

_listener: ContextVar[Listener | None] = ContextVar("duoka_progress", default=None)


def say(text: str) -> None:
    """Report the next step of a long call to the listener; without a listener do nothing."""
    listener = _listener.get()
    if listener is not None:
        listener(text)


def say_import(library: str) -> None:
    """Report that a library is about to be imported, which may take seconds; not if it was."""
    if library not in sys.modules:
        say(f"importing {library}")


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Set the listener within a scope."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)

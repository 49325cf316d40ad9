"""Progress of long calls, as texts for a listener; independent of terminals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]

_listener: ContextVar[Listener | None] = ContextVar("duoka_progress", default=None)


def say(text: str) -> None:
    """Pass a text about the next step to the listener, if any."""
    listener = _listener.get()
    if listener is not None:
        listener(text)


def say_import(library: str) -> None:
    """Report the import of a library, unless it is imported already; some take seconds."""
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

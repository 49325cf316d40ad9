"""Choices: texts that must be one of a few names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from duoka.errors import UsageError

Name = TypeVar("Name", bound=str)


def choose(what: str, text: str, known: Sequence[Name]) -> Name:
    """Return the name that a text is.

    Examples
    --------
    >>> choose("colour", "red", ("green", "red"))
    'red'
    """
    for name in known:
        if name == text:
            return name
    raise UsageError(f"{what} {text!r} is unknown", hint=f"known are {', '.join(known)}")

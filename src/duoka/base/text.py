"""Text: what others wrote, made harmless to show; and choices among a few names."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import TypeVar

from duoka.errors import UsageError

# Control characters and those that turn the direction of writing around can make a terminal or a
# page show something else than the text says, or do something; Cf also holds what emoji and
# Persian need.
_KEPT = frozenset("\n\t\u200c\u200d")
_HIDDEN = ("Cc", "Cf", "Cs")
Name = TypeVar("Name", bound=str)


def printable(text: str) -> str:
    r"""Spell out what a terminal would obey instead of showing.

    Examples
    --------
    >>> printable("red: \x1b[31m")
    'red: \\x1b[31m'
    """
    if text.isprintable():
        return text
    return "".join(map(_spelled, text))


def _spelled(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


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

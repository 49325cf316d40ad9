"""Text: what others wrote, made harmless to show; names that are one of a few, or have dots."""

from __future__ import annotations

import unicodedata
from collections.abc import Container, Iterator, Sequence
from typing import TypeVar

from duoka.errors import UsageError

# Control characters and those that turn the direction of writing around can make a terminal or a
# page show something else than the text says, or do something; Cf also holds what emoji and
# Persian need.
_KEPT = frozenset("\n\t\u200c\u200d")
_HIDDEN = ("Cc", "Cf", "Cs")
Name = TypeVar("Name", bound=str)


def printable(text: str) -> str:
    r"""Spell out what a terminal would obey instead of showing."""
    if text.isprintable():
        return text
    return "".join(map(_spelled, text))


def _spelled(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


def choose(what: str, text: str, known: Sequence[Name]) -> Name:
    """Return the name that a text is."""
    for name in known:
        if name == text:
            return name
    raise UsageError(f"{what} {text!r} is unknown", hint=f"known are {', '.join(known)}")


def prefixes(name: str) -> Iterator[str]:
    """A dotted name and all that contain it, the longest first; "" contains every name."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def longest_prefix(name: str, names: Container[str]) -> str | None:
    """The longest of some names that is a dotted name or contains it; None where none does."""
    return next((prefix for prefix in prefixes(name) if prefix in names), None)


def is_within(name: str, prefix: str) -> bool:
    """Whether a dotted name is another one, or lies below it."""
    return prefix in ("", name) or name.startswith(prefix + ".")


def containing(name: str) -> Iterator[str]:
    """The names that contain a dotted name, the longest first, but for ""."""
    while name := name.rpartition(".")[0]:
        yield name

"""Text: escaping of foreign texts, choices among names, and dotted names."""

from __future__ import annotations

import unicodedata
from collections.abc import Container, Iterator, Sequence
from typing import TypeVar

from duoka.errors import UsageError

# Control characters, and characters that change the direction of writing, can make a terminal or a
# page show something else than the text, or do something. Of the category Cf emoji and Persian
# need some.
_KEPT = frozenset("\n\t\u200c\u200d")
_HIDDEN = ("Cc", "Cf", "Cs")
Name = TypeVar("Name", bound=str)


def printable(text: str) -> str:
    r"""Escape control characters of a terminal."""
    if text.isprintable():
        return text
    return "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


def choose(what: str, text: str, names: Sequence[Name]) -> Name:
    """Return the name equal to a text; raise UsageError for another text."""
    for name in names:
        if name == text:
            return name
    raise UsageError(f"{what} {text!r} is unknown", hint=f"supported: {', '.join(names)}")


def prefixes(name: str) -> Iterator[str]:
    """Yield a dotted name and its prefixes, the longest first, the empty one last."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def longest_prefix(name: str, names: Container[str]) -> str | None:
    """Return the longest prefix of a dotted name among some names; None without any."""
    return next((prefix for prefix in prefixes(name) if prefix in names), None)


def is_within(name: str, prefix: str) -> bool:
    """Return True for a dotted name equal to or below a prefix."""
    return prefix in ("", name) or name.startswith(prefix + ".")


def containing(name: str) -> Iterator[str]:
    """Yield the proper prefixes of a dotted name, the longest first, without the empty one."""
    while name := name.rpartition(".")[0]:
        yield name

"""Text: escaping of untrusted texts, choices among names, and dotted names."""

from __future__ import annotations

import unicodedata
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import TypeVar

from duoka.errors import UsageError

# Control characters, and characters that change the writing direction, can falsify the display of a
# text or control the terminal. Emoji and Persian texts need two joiners of the category Cf.
_KEPT = frozenset("\n\t\u200c\u200d")
_HIDDEN = ("Cc", "Cf", "Cs")
Name = TypeVar("Name", bound=str)
Value = TypeVar("Value")


def printable(text: str) -> str:
    r"""Escape control, format and surrogate characters, except for newlines, tabs and joiners."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(character: str) -> str:
    if character in _KEPT or unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


def choose(what: str, text: str, names: Sequence[Name]) -> Name:
    """Return the name that equals a text; raise UsageError about `what` if none does."""
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
    """Return the longest prefix of a dotted name that is among `names`; None if no prefix is."""
    return next((prefix for prefix in prefixes(name) if prefix in names), None)


def value_of(name: str, values: Mapping[str, Value]) -> Value | None:
    """Return the value of the longest prefix of a dotted name; None if no prefix has one."""
    prefix = longest_prefix(name, values)
    return None if prefix is None else values[prefix]


def is_within(name: str, prefix: str) -> bool:
    """Return True for a dotted name equal to or below a prefix."""
    return prefix in ("", name) or name.startswith(prefix + ".")


def containing(name: str) -> Iterator[str]:
    """Yield the proper prefixes of a dotted name, the longest first, without the empty one."""
    while name := name.rpartition(".")[0]:
        yield name

"""Where the characters of a source line stand on a terminal: tabs, wide characters, others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from rich.cells import cell_len

_TAB = 4


def cells(line: str) -> Iterator[int]:
    r"""The cell in which each character begins, and at last the one behind them all.

    Examples
    --------
    >>> list(cells("\tx = 卡"))
    [0, 4, 5, 6, 7, 8, 10]
    """
    at = 0
    for character in line:
        yield at
        at += _TAB - at % _TAB if character == "\t" else cell_len(_shown(character))
    yield at


def expanded(line: str) -> str:
    """A line whose tabs are blanks, and whose control characters are dots."""
    return "".join(
        " " * (stop - start) if character == "\t" else _shown(character)
        for character, (start, stop) in zip(line, itertools.pairwise(cells(line)), strict=True)
    )


def indent(line: str) -> int:
    """How many characters a line is indented by."""
    return len(line) - len(line.lstrip())


def first_from(text: str, cell: int) -> int:
    """The first character that begins in a cell or behind it."""
    return next((index for index, start in enumerate(cells(text)) if start >= cell), len(text))


def first_beyond(text: str, cell: int) -> int:
    """The first character that ends behind a cell."""
    ends = itertools.islice(cells(text), 1, None)
    return next((index for index, stop in enumerate(ends) if stop > cell), len(text))


def _shown(character: str) -> str:
    return character if character.isprintable() or character == "\t" else "·"

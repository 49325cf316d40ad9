"""A few lines of source with marks under its expressions. It knows no faults and no devices."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.syntax import Syntax
from rich.text import Text

from ..check_report import Place

_BEFORE, _AFTER = 2, 1  # lines of context
_LONGEST = 7  # a longer expression is shown by its ends and its marked lines
_END = 2
_MARGIN = 4  # cells that stay in sight before a mark in a line that is too long
_NARROWEST = 16
_THEME = "ansi_dark"  # the terminal's own colours
_TAB = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What is said of a piece of the source, under it."""

    place: Place
    label: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class _Span:
    """Cells of one line that are marked; what has no label is the place itself."""

    start: int
    stop: int
    label: str = ""
    style: str = ""

    def seen(self, left: int, room: int) -> _Span:
        """The same in the cells that there is room for; what lies behind them is at their end."""
        start = min(max(self.start - left, 0), room - 1)
        stop = min(max(self.stop - left, start + 1), room)
        return _Span(start, stop, self.label, self.style)


class Excerpt:
    """Lines around a place, with line numbers; where it can't be read, the place's own text.

    The place is underlined. Marks are pieces of it; those that stand elsewhere are left out.
    """

    def __init__(self, place: Place, marks: Sequence[Mark] = ()) -> None:
        self._place = place
        self._marks = [mark for mark in marks if _is_within(mark.place, place)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _read(self._place)
        if not lines:
            yield Text(self._place.text)
            return
        bar, gap, dots = ("|", ":", "...") if options.ascii_only else ("│", "⋮", "…")
        digits = len(str(max(lines)))
        room = max(options.max_width - digits - len(f" {bar} "), _NARROWEST)
        spans = self._spans(lines)
        left = _left(lines, spans, room)
        texts = _texts(lines, coloured=console.color_system is not None)
        before = min(lines) - 1
        for number in self._numbers(lines):
            if number != before + 1:
                yield Text(f"{gap:>{digits}} {bar}", style="dim")
            before = number
            text = texts[number][left:]
            if texts[number].plain[:left].strip():
                text = Text.assemble((dots, "dim"), text[len(dots) :])
            yield _with_margin(f"{number:>{digits}} {bar} ", text)
            seen = [span.seen(left, room) for span in spans.get(number, ())]
            for under in self._under(seen, room, ascii_only=options.ascii_only):
                yield _with_margin(f"{'':{digits}} {bar} ", under)

    def _numbers(self, lines: Mapping[int, str]) -> list[int]:
        first, last = self._place.line, _last_line(self._place)
        if last - first < _LONGEST:
            return sorted(lines)
        shown = {*range(first - _BEFORE, first + _END), *range(last - _END + 1, last + _AFTER + 1)}
        shown |= {mark.place.line for mark in self._marks}
        return sorted(shown & lines.keys())

    def _spans(self, lines: Mapping[int, str]) -> dict[int, list[_Span]]:
        """By line, the cells of the place itself and of the marks; one for equal marks."""
        alike: dict[tuple[int, ...], list[Mark]] = {}
        for mark in self._marks:
            place = mark.place
            extent = (place.line, place.column, place.end_line, place.end_column)
            alike.setdefault(extent, []).append(mark)
        marks = [Mark(place=self._place, label="")]
        for first, *more in alike.values():
            label = ", ".join(dict.fromkeys(mark.label for mark in (first, *more)))
            marks.append(Mark(place=first.place, label=label, style=first.style))
        line_spans: dict[int, list[_Span]] = {}
        for mark in marks:
            span = _span(mark, lines[mark.place.line])
            line_spans.setdefault(mark.place.line, []).append(span)
        return line_spans

    def _under(self, spans: list[_Span], room: int, *, ascii_only: bool) -> Iterator[Text]:
        """What stands under a line: arrows under its expressions, then a label for each."""
        line, stem = ("-", "|") if ascii_only else ("─", "│")
        in_order = sorted(spans, key=lambda span: span.start)
        marks = [span for span in in_order if span.label]
        under: dict[int, tuple[str, str]] = {}
        for span in [span for span in in_order if not span.label]:
            sign = line if self._marks else "^"
            under = dict.fromkeys(range(span.start, span.stop), (sign, "red"))
        for mark in marks:
            under |= dict.fromkeys(range(mark.start, mark.stop), ("^", mark.style))
        if under:
            yield _row(under)
        while marks:
            last = marks.pop()
            start = max(min(last.start, room - len(last.label)), 0)
            under = {mark.start: (stem, mark.style) for mark in marks}
            under |= {cell: (sign, last.style) for cell, sign in enumerate(last.label, start)}
            yield _row(under)


def _left(lines: Mapping[int, str], spans: Mapping[int, list[_Span]], room: int) -> int:
    """Return the first cell to show: the code's, or a later one where no mark would be seen."""
    written = [expand(line) for line in lines.values() if line.strip()]
    left = min(map(indent, written), default=0)
    every = [span for line_spans in spans.values() for span in line_spans]
    marked = [span for span in every if span.label] or every
    start = min(span.start for span in marked)
    return left if start + _MARGIN - left <= room else start - _MARGIN


def _read(place: Place) -> dict[int, str]:
    """The lines around a place by number; none if the file isn't what it was."""
    linecache.checkcache(place.file)
    every = linecache.getlines(place.file)
    first, last = place.line, _last_line(place)
    if not 1 <= first <= last <= len(every):
        return {}
    if _without_blanks(place.text) not in _without_blanks("".join(every[first - 1 : last])):
        return {}
    start = max(first - _BEFORE, 1)
    shown = every[start - 1 : last + _AFTER]
    return {number: line.rstrip("\r\n") for number, line in enumerate(shown, start)}


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _last_line(place: Place) -> int:
    return max(place.end_line, place.line)


def _is_within(inner: Place, outer: Place) -> bool:
    is_inside = outer.line <= inner.line <= _last_line(inner) <= _last_line(outer)
    return inner.file == outer.file and is_inside


def _span(mark: Mark, line: str) -> _Span:
    """The cells of a mark in the line that it begins in."""
    place, length = mark.place, len(line.rstrip())
    if not place.end_line:  # only its line is known
        place = replace(place, column=indent(line), end_column=length)
    start = min(place.column, length)
    stop = length if place.end_line > place.line else min(max(place.end_column, start), length)
    first, end = (cell_len(expand(line[:column])) for column in (start, stop))
    return _Span(first, max(end, first + 1), mark.label, mark.style)


def _texts(lines: Mapping[int, str], *, coloured: bool) -> dict[int, Text]:
    plain = {number: expand(line) for number, line in lines.items()}
    texts = {number: Text(line) for number, line in plain.items()}
    if coloured:
        code = Syntax("", "python", theme=_THEME, background_color="default")
        lit = code.highlight("\n".join(plain.values())).split("\n", allow_blank=True)
        if [line.plain for line in lit[: len(plain)]] == list(plain.values()):
            texts = dict(zip(plain, lit, strict=False))
    return texts


def _row(signs: Mapping[int, tuple[str, str]]) -> Text:
    """One line from the signs in its cells."""
    return Text.assemble(*(signs.get(cell, " ") for cell in range(max(signs) + 1)))


def _with_margin(margin: str, text: Text) -> Text:
    joined = Text.assemble((margin, "dim"), text)
    joined.no_wrap, joined.overflow = True, "ellipsis"
    return joined


def expand(line: str) -> str:
    """A line whose tabs are blanks, and whose control characters are dots."""
    return "".join(sign if sign.isprintable() else "·" for sign in line.expandtabs(_TAB))


def indent(line: str) -> int:
    """How many characters a line is indented by."""
    return len(line) - len(line.lstrip())

"""Render source lines with marks under expressions."""

from __future__ import annotations

import linecache
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ..check_report import Place

_BEFORE, _AFTER = 2, 1  # lines of context
_LONGEST = 7  # lines; of a longer expression only its ends and marked lines are shown
_END = 2
_MARGIN = 4  # cells kept visible before a mark in a line that is too long
_NARROWEST = 16
_TAB = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A label under a range of source."""

    place: Place
    label: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class _Span:
    """Marked cells [start, stop) of a line; the place itself has no label."""

    start: int
    stop: int
    label: str = ""
    style: str = ""

    def clip(self, first_cell: int, room: int) -> _Span:
        """Shift and clip the span to the visible cells [first_cell, first_cell + room)."""
        start = min(max(self.start - first_cell, 0), room - 1)
        stop = min(max(self.stop - first_cell, start + 1), room)
        return _Span(start, stop, self.label, self.style)


class Excerpt:
    """Numbered source lines around a place, with the place underlined and its marks labelled.

    If the file has changed, only the recorded text of the place is shown. Marks outside of the
    place are ignored.
    """

    def __init__(self, place: Place, marks: Sequence[Mark] = ()) -> None:
        self._place = place
        self._marks = [mark for mark in marks if _is_within(mark.place, place)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = _read_lines(self._place)
        if not lines:
            yield Text(self._place.text)
            return
        bar, gap, dots = ("|", ":", "...") if options.ascii_only else ("│", "⋮", "…")
        digits = len(str(max(lines)))
        room = max(options.max_width - digits - len(f" {bar} "), _NARROWEST)
        spans = self._spans(lines)
        first_cell = _first_visible_cell(lines, spans, room)
        texts = {number: Text(expand(line)) for number, line in lines.items()}
        previous = min(lines) - 1
        for number in self._numbers(lines):
            if number != previous + 1:
                yield Text(f"{gap:>{digits}} {bar}", style="dim")
            previous = number
            text = texts[number][first_cell:]
            if texts[number].plain[:first_cell].strip():
                text = Text.assemble((dots, "dim"), text[len(dots) :])
            yield _with_margin(f"{number:>{digits}} {bar} ", text)
            visible_spans = [span.clip(first_cell, room) for span in spans.get(number, ())]
            for under in self._underlines(visible_spans, room, ascii_only=options.ascii_only):
                yield _with_margin(f"{'':{digits}} {bar} ", under)

    def _numbers(self, lines: Mapping[int, str]) -> list[int]:
        """Return the shown line numbers: all, or the ends and marked lines of a long place."""
        first, last = self._place.line, _last_line(self._place)
        if last - first < _LONGEST:
            return sorted(lines)
        ends = {*range(first - _BEFORE, first + _END), *range(last - _END + 1, last + _AFTER + 1)}
        marked = {mark.place.line for mark in self._marks}
        return sorted((ends | marked) & lines.keys())

    def _spans(self, lines: Mapping[int, str]) -> dict[int, list[_Span]]:
        """Return the spans of the place and its marks by line; marks at one place are merged."""
        equal_marks: dict[Place, list[Mark]] = {}
        for mark in self._marks:
            equal_marks.setdefault(mark.place, []).append(mark)
        marks = [Mark(place=self._place, label="")]
        for place, equal in equal_marks.items():
            label = ", ".join(dict.fromkeys(mark.label for mark in equal))
            marks.append(Mark(place=place, label=label, style=equal[0].style))
        line_spans: dict[int, list[_Span]] = {}
        for mark in marks:
            span = _span(mark, lines[mark.place.line])
            line_spans.setdefault(mark.place.line, []).append(span)
        return line_spans

    def _underlines(self, spans: list[_Span], room: int, *, ascii_only: bool) -> Iterator[Text]:
        """Yield the rows under a line: underlines of its expressions, then one row per label."""
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
            yield _draw_row(under)
        while marks:
            last = marks.pop()
            start = max(min(last.start, room - len(last.label)), 0)
            under = {mark.start: (stem, mark.style) for mark in marks}
            under |= {cell: (sign, last.style) for cell, sign in enumerate(last.label, start)}
            yield _draw_row(under)


def _first_visible_cell(
    lines: Mapping[int, str], spans: Mapping[int, list[_Span]], room: int
) -> int:
    """Return the first visible cell: after the indentation, or further right to show a mark."""
    written = [expand(line) for line in lines.values() if line.strip()]
    first_cell = min(map(indent, written), default=0)
    every = [span for line_spans in spans.values() for span in line_spans]
    marked = [span for span in every if span.label] or every
    start = min(span.start for span in marked)
    return first_cell if start + _MARGIN - first_cell <= room else start - _MARGIN


def _read_lines(place: Place) -> dict[int, str]:
    """Return the lines around a place by number; empty if the file has changed."""
    linecache.checkcache(place.file)
    every = linecache.getlines(place.file)
    first, last = place.line, _last_line(place)
    if not 1 <= first <= last <= len(every):
        return {}
    if _without_blanks(place.text) not in _without_blanks("".join(every[first - 1 : last])):
        return {}
    start = max(first - _BEFORE, 1)
    excerpt = every[start - 1 : last + _AFTER]
    return {number: line.rstrip("\r\n") for number, line in enumerate(excerpt, start)}


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _last_line(place: Place) -> int:
    return max(place.end_line, place.line)


def _is_within(inner: Place, outer: Place) -> bool:
    is_inside = outer.line <= inner.line <= _last_line(inner) <= _last_line(outer)
    return inner.file == outer.file and is_inside


def _span(mark: Mark, line: str) -> _Span:
    """Return the cells of a mark in its first line."""
    place, length = mark.place, len(line.rstrip())
    if not place.end_line:  # the columns are unknown
        place = replace(place, column=indent(line), end_column=length)
    start = min(place.column, length)
    stop = length if place.end_line > place.line else min(max(place.end_column, start), length)
    first, end = (cell_len(expand(line[:column])) for column in (start, stop))
    return _Span(first, max(end, first + 1), mark.label, mark.style)


def _draw_row(signs: Mapping[int, tuple[str, str]]) -> Text:
    """Build a row from (character, style) by cell; other cells are blank."""
    return Text.assemble(*(signs.get(cell, " ") for cell in range(max(signs) + 1)))


def _with_margin(margin: str, text: Text) -> Text:
    joined = Text.assemble((margin, "dim"), text)
    joined.no_wrap, joined.overflow = True, "ellipsis"
    return joined


def expand(line: str) -> str:
    """Replace tabs by spaces and control characters by dots."""
    return "".join(sign if sign.isprintable() else "·" for sign in line.expandtabs(_TAB))


def indent(line: str) -> int:
    """Return the number of leading blanks."""
    return len(line) - len(line.lstrip())

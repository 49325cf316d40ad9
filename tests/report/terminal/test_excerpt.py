"""Source with arrows: tabs, wide characters, long lines, files that are gone."""

from __future__ import annotations

import linecache
from dataclasses import replace
from pathlib import Path

import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from reports import place_of
from rich.cells import cell_len

from duoka.report.check_report import Place
from duoka.report.terminal import render_plain
from duoka.report.terminal.excerpt import Excerpt, Mark, expand


def shown(file: Path, source: str, text: str, *marks: str, width: int = 80) -> list[str]:
    file.write_text(source, encoding="utf-8")
    place = place_of(file, text)
    found = [Mark(place=place_of(file, mark), label=f"<{mark}>") for mark in marks]
    return render_plain(Excerpt(place, found), width).splitlines()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "source.py"


def test_without_marks_the_place_has_arrows(file: Path) -> None:
    assert shown(file, "a = 1\nb = a + 1\nc = 2\nd = 3\n", "a + 1") == [
        "1 │ a = 1",
        "2 │ b = a + 1",
        "  │     ^^^^^",
        "3 │ c = 2",
    ]


def test_marks_have_labels_under_them(file: Path) -> None:
    assert shown(file, "    b = x + y * 2\n", "x + y * 2", "x", "y * 2") == [
        "1 │ b = x + y * 2",
        "  │     ^───^^^^^",
        "  │     │   <y * 2>",
        "  │     <x>",
    ]


def test_equal_marks_share_one_line(file: Path) -> None:
    file.write_text("cat(parts)\n", encoding="utf-8")
    place = place_of(file, "parts")
    marks = [Mark(place=place, label=label) for label in ("cuda:0", "cuda:1", "cuda:0")]
    lines = render_plain(Excerpt(place_of(file, "cat(parts)"), marks)).splitlines()
    assert lines[1:] == ["  │ ────^^^^^─", "  │     cuda:0, cuda:1"]


def test_tabs_and_wide_characters(file: Path) -> None:
    lines = shown(file, '\tif x:\n\t\ty = "多卡" + x\n', '"多卡" + x', "x")
    assert lines[0] == "1 │ if x:"
    lines = shown(file, '\t\ty = "多卡" + zz\n', '"多卡" + zz', "zz")
    assert lines == [
        '1 │ y = "多卡" + zz',
        "  │     ─────────^^",
        "  │              <zz>",
    ]


def test_long_lines_are_cut(file: Path) -> None:
    source = f"result = function({'argument, ' * 20}wanted, {'argument, ' * 20})\n"
    lines = shown(file, source, source.strip(), "wanted", width=40)
    assert all(len(line) <= 40 for line in lines)
    assert lines[0].startswith("1 │ …")
    start = lines[0].index("wanted")
    assert lines[1][start : start + 6] == "^" * 6


def test_an_expression_of_many_lines_is_shown_by_its_ends(file: Path) -> None:
    inner = "".join(f"    part_{number},\n" for number in range(20))
    file.write_text(f"before\nx = cat(\n{inner}    last,\n)\nafter\n", encoding="utf-8")
    whole = Place(file=str(file), line=2, column=4, end_line=24, end_column=1)
    marks = [Mark(place=place_of(file, "part_9"), label="cuda:1")]
    lines = render_plain(Excerpt(whole, marks)).splitlines()
    text = "\n".join(lines)
    for wanted in ("before", "x = cat(", "part_9,", "cuda:1", "last,", "after"):
        assert wanted in text
    assert "part_4" not in text
    assert sum("⋮" in line for line in lines) == 2


def test_a_line_alone_is_marked_whole(file: Path) -> None:
    file.write_text("if x:\n    y = f(x)  \n", encoding="utf-8")
    lines = render_plain(Excerpt(Place(file=str(file), line=2))).splitlines()
    assert lines[2] == "  │     ^^^^^^^^"


def test_a_file_that_is_gone_or_another_one(file: Path) -> None:
    file.write_text("a = b + c\n", encoding="utf-8")
    place = place_of(file, "b + c")
    file.write_text("something = else_entirely\n" * 3, encoding="utf-8")
    assert render_plain(Excerpt(place)) == "b + c\n"
    file.unlink()
    assert render_plain(Excerpt(place)) == "b + c\n"
    assert render_plain(Excerpt(replace(place, file="<string>", line=0))) == "b + c\n"


def test_control_characters_are_dots(file: Path) -> None:
    lines = shown(file, "x = '\x1b[31m' + y\n", "'\x1b[31m' + y", "y")
    assert lines[0] == "1 │ x = '·[31m' + y"
    assert lines[1].index("^") == lines[0].index("+ y") + 2


def test_cells() -> None:
    assert expand("\ta\tb") == "    a   b"


WIDTHS = st.sampled_from((24, 40, 80))
LINES = st.lists(st.text(max_size=60), min_size=1, max_size=12)


@fuzz(100)
@given(lines=LINES, numbers=st.lists(st.integers(0, 70), min_size=8, max_size=8), width=WIDTHS)
def test_any_text_and_any_place(lines: list[str], numbers: list[int], width: int) -> None:
    source = "\n".join(lines)
    name = f"<excerpt {abs(hash(source))}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    first, last, start, stop, *inner = numbers
    place = Place(file=name, line=first, column=start, end_line=last, end_column=stop)
    within = Place(
        file=name, line=inner[0], column=inner[1], end_line=inner[2], end_column=inner[3]
    )
    text = render_plain(Excerpt(place, [Mark(place=within, label="cuda:1")]), width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    linecache.cache.pop(name)

from __future__ import annotations

import io
import sys

import pytest
from rich.table import Table
from rich.text import Text

from duoka.cli import errors, terminal
from duoka.cli.terminal import printable
from duoka.errors import CheckpointError

HOSTILE = [
    "\x1b[31m",
    "\x1b]0;title\x07",
    "\x9b31m",
    "\x07",
    "\x08",
    "\r",
    "\x7f",
    "\u202e",
    "\u2066",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_what_a_terminal_would_obey_is_spelled_out(text: str) -> None:
    shown = printable(f"a{text}b")
    assert shown.isprintable()
    assert shown.startswith("a\\")
    assert shown.endswith("b")


@pytest.mark.parametrize("text", ["", "plain", "两张卡\n\ttab", "👩‍🚀 family", "می‌خواهم", "\u00a0"])
def test_other_text_stays(text: str) -> None:
    assert printable(text) == text


def test_errors_from_checkpoints_are_spelled_out(capsys: pytest.CaptureFixture[str]) -> None:
    errors.report(CheckpointError("the model '\x1b[2J' is unknown", hint="\x07"), debug=False)
    err = capsys.readouterr().err
    assert "\x1b" not in err
    assert "\x07" not in err
    assert "\\x1b[2J" in err


def test_names_out_of_files_are_spelled_out(capsys: pytest.CaptureFixture[str]) -> None:
    for console in (terminal.stdout(), terminal.stderr()):
        table = Table("[red]x[/]")
        table.add_row("layers\x1b[2J.0")
        console.print(Text("a\x1b]0;b\x07"), table, "tab\tnew\nline")
    for printed in capsys.readouterr():
        assert "\x1b" not in printed
        assert "\x07" not in printed
        assert "layers\\x1b" in printed
        assert "a\\x1b]0;b" in printed


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_answers_are_harmless_to_a_terminal_and_whole_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for stream, shown in ((Screen(), "a\\x1b[2Jb\n"), (io.StringIO(), "a\x1b[2Jb\n")):
        monkeypatch.setattr(sys, "stdout", stream)
        terminal.answer("a\x1b[2Jb\n")
        assert stream.getvalue() == shown

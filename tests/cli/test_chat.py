"""A conversation through a pipe, and in a terminal (a pseudo-terminal of the tests' own)."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import GPUS, SIZES, Program
from .terminals import Terminal


def test_a_conversation_through_a_pipe(tiny: Path, program: Program) -> None:
    said = "What is NVLink?\n/clear\nWhat is NVLink?\n/help\n/frob\n\n/exit\nnot read\n"
    done = program("chat", tiny, *GPUS, *SIZES, stdin=said)
    assert done.returncode == 0
    half = len(done.stdout) // 2
    assert done.stdout[:half] == done.stdout[half:]  # the same question without history
    assert "forgotten" in done.stderr
    assert "/frob is not a command" in done.stderr
    assert "Ctrl-C stops a generation" in done.stderr


@pytest.mark.slow
def test_memory_and_speed_are_told(tiny: Path, program: Program) -> None:
    done = program("chat", tiny, *GPUS, *SIZES, stdin="What is NVLink?\n/exit\n")
    assert re.search(r"vgpu:0 .*MiB", done.stderr)
    assert re.search(r"first token after .* then .* tokens/s", done.stderr)


@pytest.mark.slow
def test_pasted_lines_are_one_question(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    for pasted in ("\x1b[200~/clear\n/clear\x1b[201~\r", "/clear\n/clear\n"):
        terminal.send(pasted)
        assert "forgotten" not in terminal.wait_for("reading the question")
        terminal.send("\x03")
        terminal.wait_for(r"stopped\s[^>]*> ")


def test_a_question_that_is_too_long_does_not_end_it(tiny: Path, program: Program) -> None:
    done = program("chat", tiny, *GPUS, *SIZES, stdin=f"{'What? ' * 200}\nhello\n")
    assert done.returncode == 0
    assert "tokens; the plan has memory for 64" in done.stderr
    assert len(done.stdout) > 1


@pytest.fixture
def terminal(tiny: Path, environment: dict[str, str], forking_python: Path) -> Iterator[Terminal]:
    arguments = ["chat", str(tiny), *GPUS, "--new-tokens", "900"]
    started = Terminal(arguments, environment, python=str(forking_python))
    yield started
    started.close()


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal) -> None:
    assert "\x1b[?25l" not in terminal.wait_for("> ")[-20:]
    terminal.send("What is NVLink?\n")
    terminal.wait_for("reading the question")
    terminal.send("\x03")
    terminal.wait_for(r"stopped\s[^>]*> ")
    time.sleep(1)  # a signal just before the prompt's blocking read would wait for a key
    terminal.send("\x03")
    terminal.wait_for(r"/exit quits\s[^>]*> ")
    terminal.send("/clear\n")
    terminal.wait_for(r"forgotten\s[^>]*> ")
    terminal.send("/exit\n")
    assert terminal.process.wait(timeout=120) == 0


@pytest.mark.slow
def test_ctrl_d_leaves(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.send("\x04")
    assert terminal.process.wait(timeout=120) == 0

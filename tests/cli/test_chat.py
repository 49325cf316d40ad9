"""A conversation through a pipe, and in a terminal (a pseudo-terminal of the tests' own)."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import GPUS, MAIN, PROGRAM, SIZES, Program


def test_a_conversation_through_a_pipe(tiny: Path, program: Program) -> None:
    said = "What is NVLink?\n/clear\nWhat is NVLink?\n/help\n/frob\n\n/exit\nnot read\n"
    done = program("chat", tiny, *GPUS, *SIZES, stdin=said)
    assert done.returncode == 0
    half = len(done.stdout) // 2
    assert done.stdout[:half] == done.stdout[half:]  # the same question without history
    assert "forgotten" in done.stderr
    assert "/frob is no command" in done.stderr
    assert "Ctrl-C stops an answer" in done.stderr


def test_the_end_of_the_input_ends_it(tiny: Path, program: Program) -> None:
    done = program("chat", tiny, *GPUS, *SIZES, stdin="What is NVLink?")
    assert done.returncode == 0
    assert done.stdout.endswith("\n")


def test_a_question_that_is_too_long_does_not_end_it(tiny: Path, program: Program) -> None:
    done = program("chat", tiny, *GPUS, *SIZES, stdin=f"{'What? ' * 200}\nhello\n")
    assert done.returncode == 0
    assert "the plan has memory for 64" in done.stderr
    assert len(done.stdout) > 1


class Terminal:
    """A program at a pseudo-terminal."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self._end, other = pty.openpty()
        self.process = subprocess.Popen(
            command,
            stdin=other,
            stdout=other,
            stderr=other,
            env=environment,
            start_new_session=True,
        )
        os.close(other)
        self.seen = ""

    def send(self, text: str) -> None:
        os.write(self._end, text.encode())

    def wait_for(self, pattern: str, seconds: float = 120) -> str:
        """Read until a pattern appears in what came since the last call; return that."""
        end = time.monotonic() + seconds
        while re.search(pattern, self.seen) is None:
            left = end - time.monotonic()
            assert left > 0, f"no {pattern!r} in {self.seen!r}"
            if select.select([self._end], [], [], min(left, 1))[0]:
                try:
                    self.seen += os.read(self._end, 65536).decode("utf-8", "replace")
                except OSError:  # the program has gone
                    assert re.search(pattern, self.seen), f"no {pattern!r} in {self.seen!r}"
        found, self.seen = self.seen, ""
        return found

    def close(self) -> None:
        os.close(self._end)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture
def terminal(tiny: Path, environment: dict[str, str]) -> Iterator[Terminal]:
    # The session's own terminal, so that Ctrl-C there is a signal here.
    controlling = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {MAIN}"
    command = [PROGRAM[0], "-c", controlling, "chat", str(tiny), *GPUS, "--new-tokens", "900"]
    started = Terminal(command, environment)
    yield started
    started.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal) -> None:
    assert "\x1b[?25l" not in terminal.wait_for("> ")[-20:]
    terminal.send("What is NVLink?\n")
    terminal.wait_for(r"NVLink\?\s+\S+")
    terminal.send("\x03")
    terminal.wait_for(r"stopped\s[^>]*> ")
    # Between two prompts there is a moment in which nothing listens: a person presses it again.
    for attempt in range(6):
        terminal.send("\x03")
        try:
            terminal.wait_for(r"/exit leaves\s[^>]*> ", seconds=15)
            break
        except AssertionError:
            assert attempt < 5
    terminal.send("/clear\n")
    terminal.wait_for(r"forgotten\s[^>]*> ")
    terminal.send("/exit\n")
    assert terminal.process.wait(timeout=30) == 0


def test_ctrl_d_leaves(terminal: Terminal) -> None:
    terminal.wait_for("> ")
    terminal.send("\x04")
    assert terminal.process.wait(timeout=30) == 0

"""A program at a terminal, for tests of what people see and press."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import termios
import time

from .conftest import MAIN, PROGRAM


class Terminal:
    """A program at a pseudo-terminal."""

    def __init__(
        self, arguments: list[str], environment: dict[str, str], *, python: str = PROGRAM[0]
    ) -> None:
        # The session's own terminal, so that Ctrl-C there is a signal in the program.
        controlling = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {MAIN}"
        command = [python, "-c", controlling, *arguments]
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

    def rest(self, seconds: float = 60) -> str:
        """Read until the program has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if select.select([self._end], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self._end, 65536).decode("utf-8", "replace")
                except OSError:
                    break
            elif self.process.poll() is not None:
                break
        return self.seen

    @property
    def echoes(self) -> bool:
        """Whether what is typed is shown, as a shell expects it."""
        return bool(termios.tcgetattr(self._end)[3] & termios.ECHO)

    def hang_up(self) -> None:
        """Take the terminal away."""
        os.close(self._end)
        self._end = -1

    def close(self) -> None:
        if self._end >= 0:
            os.close(self._end)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

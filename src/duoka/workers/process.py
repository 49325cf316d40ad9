"""A child process: it ends with its parent, and its own children end with it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress


class WorkerProcess:
    """A running program in a process group of its own.

    Ctrl-C in the terminal reaches the parent alone. The standard input is a pipe that nobody writes
    to: its end tells the program that the parent is gone (see `worker.end_with_parent`).

    Parameters
    ----------
    command : sequence of str
    environment : mapping of str to str, optional
        By default the parent's.
    descriptors : sequence of int
        Open files that the program inherits under the same numbers.

    Raises
    ------
    OSError
        If no process can be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        # A group and not a session: where the parent is gone the kernel continues a group of the
        # same session that is stopped (SIGSTOP), so that it can end.
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            process_group=0,
            pass_fds=descriptors,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or the negative number of a signal; None while the program runs."""
        return self._process.poll()

    def send_signal(self, signum: int) -> None:
        """Send a signal to the program alone; do nothing after its end."""
        self._process.send_signal(signum)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the end of the program, at most so many seconds; return its exit code."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.exit_code

    def kill(self) -> None:
        """Kill all processes of the group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, grace_seconds: float = 0.0) -> int:
        """Kill the group after the grace period; return the exit code of the program."""
        self.wait(grace_seconds)
        # The group is killed once: after the end of its last process the kernel may give the number
        # to another one.
        if not self._pipe.closed:
            self.kill()
            self._pipe.close()
        return self._process.wait()


def wait_for_all(processes: Sequence[WorkerProcess], seconds: float) -> list[int | None]:
    """Wait for the end of all processes, together so many seconds; return their exit codes."""
    deadline = time.monotonic() + seconds
    return [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]


def describe_exit(code: int | None) -> str:
    """Describe how a process has ended, by its exit code."""
    if code is None:
        return "its connection was lost"
    return f"signal {-code}" if code < 0 else f"exit code {code}"

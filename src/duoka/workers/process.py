"""A child process, which ends with its parent, together with its own children."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress


class WorkerProcess:
    """A running program in a process group of its own.

    Ctrl-C in the terminal reaches only the parent. Standard input is a pipe to which nothing is
    written; end-of-file tells the program that the parent has ended (see `worker.end_with_parent`).

    Parameters
    ----------
    command : sequence of str
    environment : mapping of str to str, optional
        The program's environment; by default that of the parent.
    descriptors : sequence of int
        Open file descriptors that the program inherits, with the same numbers.

    Raises
    ------
    OSError
        If the process can't be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        # A group, not a session: if the parent ends, the kernel continues a stopped (SIGSTOP) group
        # of the same session, so that the program can end.
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, process_group=0, pass_fds=descriptors
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code, or the negated number of the signal; None while the program runs."""
        return self._process.poll()

    def send_signal(self, signum: int) -> None:
        """Send a signal to the program, not to its children; do nothing after its end."""
        self._process.send_signal(signum)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait at most so many seconds for the program to end; return `exit_code`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.exit_code

    def kill(self) -> None:
        """Kill the program and its children (SIGKILL to the group)."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def end(self, grace_seconds: float = 0.0) -> int:
        """Wait for the grace period, then kill the group; return the program's exit code."""
        self.wait(grace_seconds)
        # Kill the group only once: after its last process has ended, the kernel may reuse its
        # number for another group.
        if not self._pipe.closed:
            self.kill()
            self._pipe.close()
        return self._process.wait()


def wait_for_all(processes: Sequence[WorkerProcess], seconds: float) -> list[int | None]:
    """Wait until all processes have ended, at most `seconds` in total; return the exit codes.

    The exit code of a process that still runs is None.
    """
    deadline = time.monotonic() + seconds
    return [process.wait(max(0.0, deadline - time.monotonic())) for process in processes]


def describe_exit(code: int | None) -> str:
    """Describe an exit code; None stands for a running process with a broken channel."""
    if code is None:
        return "its connection was lost"
    return f"signal {-code}" if code < 0 else f"exit code {code}"

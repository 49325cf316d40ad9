"""Process: a program with all that it starts, its output and its end.

It has a session of its own, so that Ctrl-C reaches this program alone, which hands it on; and when
the program has ended, nothing that it started goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType, TracebackType

_LAST_LINES = 20
_MOST_LINE_BYTES = 64 * 2**10
_POLL_SECONDS = 0.1
# What is left of the output when the program has ended.
_OUTPUT_SECONDS = 2.0
# A second signal sooner is taken for the same wish.
_PATIENCE_SECONDS = 2.0
# Beside the program a process waits for the end of duoka's, however it comes, and then ends the
# program and all that it started: the end of a pipe tells of it.
_PROGRAM = """\
import os, runpy, signal, sys, time
seconds, module = float(sys.argv[1]), sys.argv[2]
program = os.getpid()
nothing = os.open(os.devnull, os.O_RDWR)
if os.fork() == 0:
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    while os.read(0, 1):
        pass
    deadline = time.monotonic() + seconds
    if os.getppid() == program:
        os.kill(program, signal.SIGTERM)
    while os.getppid() == program and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(0, signal.SIGKILL)
os.dup2(nothing, 0)
os.close(nothing)
del sys.argv[:2]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
_HANDED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,  # which many programs know, and not the terminal's end
}
SIGNALLED = 128
"""Added to a signal's number it is the exit code, as shells have it."""


class ProgramGroup:
    """A running program, and the processes that it starts.

    Parameters
    ----------
    python : sequence of str
        The command that runs Python, in its own version.
    module : str
        Which is run as a program.
    arguments : sequence of str
    environment : mapping of str to str
    tell : callable
        Is told every line of its output, standard output and error alike.
    secret : str, optional
        What is left out of that.
    grace_seconds : float
        How long the program has to end when it is asked to; then it is killed.
    """

    def __init__(
        self,
        python: Sequence[str],
        module: str,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        tell: Callable[[str], None],
        secret: str | None = None,
        grace_seconds: float,
    ) -> None:
        self._command = [*python, "-c", _PROGRAM, str(grace_seconds), module, *arguments]
        self._environment = environment
        self._tell = tell
        self._secret = secret
        self._grace_seconds = grace_seconds
        self._stopped_at: float | None = None
        self._is_started = False
        self._last: deque[str] = deque(maxlen=_LAST_LINES)
        self._former: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> ProgramGroup:
        """Start it, and hand signals on from here."""
        if threading.current_thread() is threading.main_thread():
            for signum in _HANDED_ON:
                # What this program's parent had ignored stays ignored.
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._former[signum] = signal.signal(signum, self._on_signal)
        try:
            self._start()
        except BaseException:
            self._put_back()
            raise
        if self._stopped_at is not None:  # by a signal that came before it
            self._process.terminate()
        return self

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._is_started = True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the program, and all that it started."""
        try:
            self.stop()
            self.wait()
            # What it said last; its children end with it, or are killed.
            self._reader.join(_OUTPUT_SECONDS)
        finally:
            self._kill()
            self._process.wait()
            self._reader.join(_OUTPUT_SECONDS)
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._put_back()

    def _put_back(self) -> None:
        """Put back who was to hear of signals before."""
        for signum, handler in self._former.items():
            signal.signal(signum, handler)

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to end."""
        return self._stopped_at is not None

    @property
    def exit_code(self) -> int | None:
        """How it ended, as a shell has it; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else SIGNALLED - code

    def last_lines(self) -> list[str]:
        """The end of what an ended program said."""
        self._reader.join(_OUTPUT_SECONDS)
        return list(self._last)

    def stop(self) -> None:
        """Ask it to end."""
        if self._stopped_at is None and self.exit_code is None:
            self._stopped_at = time.monotonic()
            self._process.terminate()

    def wait(self) -> int:
        """Wait until it has ended; where it was asked to and doesn't, it is killed.

        Returns
        -------
        int
            The exit code, as a shell has it.
        """
        while (code := self.exit_code) is None:
            if self._is_overdue():
                self._tell(f"vLLM didn't end within {self._grace_seconds:.0f} s, and is killed")
                self._kill()
                self._process.wait()
            time.sleep(_POLL_SECONDS)
        return code

    def _is_overdue(self) -> bool:
        stopped_at = self._stopped_at
        return stopped_at is not None and time.monotonic() - stopped_at > self._grace_seconds

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._is_started:
            self._stopped_at = now
        elif self._stopped_at is None:
            self._stopped_at = now
            self._process.send_signal(_HANDED_ON[signal.Signals(signum)])
        elif now - self._stopped_at > _PATIENCE_SECONDS:
            self._kill()

    def _kill(self) -> None:
        """Kill all that is left of the group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> None:
        """Hand the output on, line by line."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while line := output.readline(_MOST_LINE_BYTES):
                text = line.decode("utf-8", "replace").rstrip("\r\n")
                if self._secret:
                    text = text.replace(self._secret, "***")
                self._last.append(text)
                # Read on where nobody listens any more: a full pipe would stop the program.
                with suppress(OSError, ValueError):
                    self._tell(text)

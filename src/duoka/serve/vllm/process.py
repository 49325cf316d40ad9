"""Process: vLLM as a program with all that it starts, and how signals reach it.

It has a session of its own, so that Ctrl-C reaches this program alone, which hands it on; and when
it has ended, nothing that it started goes on. Its output goes where this program's goes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType, TracebackType

# Linux tells the program where duoka's ends without a word to it (PR_SET_PDEATHSIG).
_PROGRAM = """\
import ctypes, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
_HANDED_ON = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,  # which many programs know, and not the terminal's end
}
SIGNALLED = 128
"""Added to a signal's number it is the exit code, as shells have it."""


class ProgramGroup:
    """A running program, and the processes that it starts; used in the main thread.

    Parameters
    ----------
    python : sequence of str
        The command that runs Python, in its own version.
    module : str
        Which is run as a program.
    arguments : sequence of str
    environment : mapping of str to str
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
        grace_seconds: float,
    ) -> None:
        self._command = [*python, "-c", _PROGRAM, module, *arguments]
        self._environment = environment
        self._timer = threading.Timer(grace_seconds, self._kill)
        self._former: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        self.is_stopping = False

    def __enter__(self) -> ProgramGroup:
        """Start it, and hand signals on from here."""
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        for signum in _HANDED_ON:
            # What this program's parent had ignored stays ignored.
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._former[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the program, and all that it started."""
        self._stop(signal.SIGTERM)
        self._process.wait()
        self._timer.cancel()
        self._kill()
        for signum, handler in self._former.items():
            signal.signal(signum, handler)

    @property
    def exit_code(self) -> int | None:
        """How it ended, as a shell has it; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else SIGNALLED - code

    def wait(self) -> int:
        """Wait until it has ended.

        Returns
        -------
        int
            The exit code, as a shell has it.
        """
        self._process.wait()
        code = self.exit_code
        assert code is not None, "it has ended"
        return code

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._stop(_HANDED_ON[signal.Signals(signum)])

    def _stop(self, signum: int) -> None:
        """Ask it to end; where it doesn't in time, it is killed."""
        self._process.send_signal(signum)  # does nothing to one that has ended
        if not self.is_stopping:
            self.is_stopping = True
            self._timer.start()

    def _kill(self) -> None:
        """Kill all that is left of the group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

"""The worker's side: the channel to its parent, and an exit code for each kind of end."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn

from duoka.errors import DuokaError

LOST, DEFECT = 75, 70
"""Exit codes: `LOST` if another process was lost, `DEFECT` after an unexpected error."""


def end_with_parent() -> None:
    """Exit this process as soon as its parent has ended, for whatever reason."""

    # Standard input is a pipe from the parent, which never writes to it. However the parent ends,
    # even by SIGKILL, the kernel closes the pipe, and the read returns end-of-file.
    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_with_channel(serve: Callable[[Connection], object]) -> NoReturn:
    """Serve the parent over the channel whose descriptor is the last argument, then exit."""
    run_to_exit(lambda: serve(Connection(int(sys.argv[-1]))))


def run_to_exit(
    work: Callable[[], object], *, losses: tuple[type[Exception], ...] = (EOFError, OSError)
) -> NoReturn:
    """Call `work`, then exit the process with the exit code for its outcome.

    `losses` are the errors that mean the loss of another process; they exit with `LOST`.
    """
    end_with_parent()
    code = 0
    try:
        work()
    except losses:
        code = LOST
    except DuokaError as error:  # `work` has reported it
        code = error.exit_code
    except Exception:
        traceback.print_exc()
        code = DEFECT
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """Flush the output and exit at once; threads, which may wait forever, are not joined."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

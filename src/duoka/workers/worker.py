"""The side of a worker process: the channel to its parent, and an exit code for each ending."""

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
"""Exit codes of a worker that ends because another process did, and of one with a defect."""


def end_with_parent() -> None:
    """End this process when its parent is gone, in whatever way the parent ended."""

    # Standard input is a pipe that the parent alone could write to, and never does. However the
    # parent ends, also by SIGKILL, the kernel closes the pipe, and the read returns nothing.
    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run_with_channel(serve: Callable[[Connection], object]) -> NoReturn:
    """Serve the parent over the channel whose number is the last argument, then exit."""
    run_to_exit(lambda: serve(Connection(int(sys.argv[-1]))))


def run_to_exit(
    work: Callable[[], object], *, losses: tuple[type[Exception], ...] = (EOFError, OSError)
) -> NoReturn:
    """Do the work of a worker, and exit with the code of its ending.

    `losses` are the errors by which the work tells that another process is gone.
    """
    end_with_parent()
    code = 0
    try:
        work()
    except losses:
        code = LOST
    except DuokaError as error:  # the work has reported it
        code = error.exit_code
    except Exception:
        traceback.print_exc()
        code = DEFECT
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """Flush the output and exit; threads may wait for lost processes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""Backward on virtual GPUs beside CUDA: in a fork of this process.

Autograd supports one accelerator per process: either CUDA or virtual GPUs can run backward, decided
once for the process (see `naming`). So where CUDA is present, backward on virtual GPUs runs in a
fork of the process, which sends its result back and ends.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from duoka.errors import VirtualDeviceError
from duoka.workers.channel import open_result, send_result
from duoka.workers.supervision import SilenceCounter

from .backend import register
from .device_module import can_do_backward, give_name

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")
_FORK: Any = multiprocessing.get_context("fork")


def apart(
    function: Callable[_Params, _Result], *args: _Params.args, **kwargs: _Params.kwargs
) -> _Result:
    """Call a function with backward on virtual GPUs, and keep backward on CUDA possible here.

    The function may run in a fork of this process: its result or error must be picklable, and all
    other changes that it makes may be lost.
    """
    register()
    # Outside Linux no fork is safe: virtual GPUs then become this process's accelerator.
    if can_do_backward() or sys.platform != "linux":
        give_name()
        return function(*args, **kwargs)

    def run_named() -> _Result:
        give_name()
        return function(*args, **kwargs)

    return in_fork(run_named)


def in_fork(function: Callable[[], _Result], *, patience_seconds: int = 60) -> _Result:
    """Call a function in a fork of this process; the result or error must be picklable.

    A lock that another thread holds during the fork (of PyTorch's random numbers, an import, a
    stream) is never released in the fork. A fork whose threads all sleep for `patience_seconds`,
    without a child process, is taken to wait for such a lock: it is killed, and replaced once.
    """
    #   this process                          the fork
    #   ─────────────────────────────────     ──────────────────────────────────────────────────
    #   start ─────────────────────────────►  `function` names virtual GPUs torch's accelerator
    #   every second: a message? is it        runs backward on virtual GPUs
    #     asleep?                             sends the result, or the error
    #   receive  ◄──────────────────────────
    #   kill
    #
    # The accelerator of a process can't be changed back, so a process of its own takes it on and
    # ends. The process is forked, not spawned, because a closure as `function` can't be pickled.
    for _ in range(2):
        reader, writer = _FORK.Pipe(duplex=False)
        child = _FORK.Process(target=_run_in_fork, args=(writer, function))
        with warnings.catch_warnings():
            # Python warns that other threads are missing in the fork; `_run_in_fork` needs none.
            warnings.simplefilter("ignore", DeprecationWarning)
            child.start()
        writer.close()
        silence = SilenceCounter(look_seconds=1)
        message = None
        try:
            while message is None and silence.seconds < patience_seconds:
                if reader.poll(1):
                    message = reader.recv()
                silence.count(is_alive=not _is_asleep(child.pid))
        except EOFError:
            child.join()
            raise VirtualDeviceError(
                "the process that ran the model on virtual GPUs ended early: exit code "
                f"{child.exitcode}",
                hint="exit code -9 often means that the machine ran out of memory",
            ) from None
        finally:
            child.kill()
            child.join()
        if message is not None:
            return open_result(message)  # type: ignore[no-any-return]
    raise VirtualDeviceError(
        f"a fork of this process made no progress for {patience_seconds} seconds, twice",
        hint="another thread held a lock during the fork: call this while no other thread is "
        "working",
    )


def _is_asleep(pid: int) -> bool:
    """Return True if all threads of a process sleep, and no child process runs.

    A zombie counts as asleep, too: a child process of the zombie could still send the result.
    """
    with suppress(OSError):  # the process or a thread has ended meanwhile
        return all(
            (task / "stat").read_text().rpartition(")")[2].split()[0] in "SZ"
            and not (task / "children").read_text()
            for task in Path(f"/proc/{pid}/task").iterdir()
        )
    return False


def _run_in_fork(writer: Connection, function: Callable[[], Any]) -> None:
    """Run the function in the forked process, and send its result or error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the signal too, and ends this
    # The parent's objects are kept out of garbage collection, which would copy their memory pages.
    gc.freeze()
    # The parent's kernel threads don't exist in the fork: to wait for them would never end.
    torch.set_num_threads(1)
    send_result(writer, function)

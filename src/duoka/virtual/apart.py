"""Backward on virtual GPUs beside CUDA: in a fork of this process.

Autograd supports one accelerator in a process and asserts that its tensors are there: either CUDA
or virtual GPUs can run backward, decided once for the process (see `naming`). So where CUDA is
present, backward on virtual GPUs runs in a fork, which ends with its result.
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

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_FORK: Any = multiprocessing.get_context("fork")


def apart(
    function: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs
) -> _Result:
    """Call a function with backward on virtual GPUs, without taking CUDA's from this process.

    What it returns or raises must be picklable; all else that it changes may stay as it was.
    """
    register()
    # Elsewhere there is no fork, or none that is safe: it is virtual GPUs or others in a process.
    if can_do_backward() or sys.platform != "linux":
        give_name()
        return function(*args, **kwargs)

    def run_named() -> _Result:
        give_name()
        return function(*args, **kwargs)

    return in_fork(run_named)


def in_fork(function: Callable[[], _Result], *, patience_seconds: int = 60) -> _Result:
    """Call a function in a fork of this process; the result or error must be picklable.

    A lock that another thread holds at that moment is held in the fork for good: of PyTorch's
    random numbers, a module's import, a stream. A fork that sleeps for so long, and has no process
    to wait for, waits for one. It is ended, and another one made: once.
    """
    #   this process                          the fork
    #   ─────────────────────────────────     ──────────────────────────────────────────────────
    #   start ─────────────────────────────►  `function` names virtual GPUs torch's accelerator
    #   every second: a message? is it        runs backward on virtual GPUs
    #     asleep?                             sends the result, or the error
    #   receive  ◄──────────────────────────
    #   kill
    #
    # The accelerator of a process can't be changed back, so another process takes it on and ends.
    # It is forked and not spawned because `function` is a closure, which can't be pickled.
    for _ in range(2):
        reader, writer = _FORK.Pipe(duplex=False)
        child = _FORK.Process(target=_answer, args=(writer, function))
        with warnings.catch_warnings():
            # Of the threads that aren't in the fork none is needed there: see `_answer`.
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

    An ended process, whose result another process could still send, counts as asleep.
    """
    with suppress(OSError):  # it has ended
        return all(
            (task / "stat").read_text().rpartition(")")[2].split()[0] in "SZ"
            and not (task / "children").read_text()
            for task in Path(f"/proc/{pid}/task").iterdir()
        )
    return False


def _answer(writer: Connection, function: Callable[[], Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends this
    # What there was stays: a collection that looked at all of it would copy its memory.
    gc.freeze()
    # Kernels that wait for the threads of the parent's would wait forever.
    torch.set_num_threads(1)
    send_result(writer, function)

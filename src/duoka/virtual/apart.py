"""What does backward on virtual GPUs, beside CUDA: in a process of its own.

Autograd knows one accelerator in a process and asserts that its tensors are on it: either CUDA or
virtual GPUs can do backward, and which is decided for good (see `naming`). So where CUDA is there,
backward on virtual GPUs runs in a fork of this process, which is thrown away.
"""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

import torch

from duoka.base.portable import portable
from duoka.errors import VirtualDeviceError

from .backend import register
from .device_module import can_do_backward, give_name

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def apart(
    function: Callable[_Given, _Result], *args: _Given.args, **kwargs: _Given.kwargs
) -> _Result:
    """Call a function in which virtual GPUs can do backward, and leave CUDA's backward as it is.

    What it returns or raises must be picklable; all else that it changes may stay as it was.
    """
    register()
    # Elsewhere there is no fork, or none that is safe: it is virtual GPUs or others in a process.
    if can_do_backward() or sys.platform != "linux":
        give_name()
        return function(*args, **kwargs)
    context: Any = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(writer, function, args, kwargs))
    with warnings.catch_warnings():
        # Of the threads that aren't in the fork none is needed there: see `_answer`.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    writer.close()
    try:
        result, error = pickle.loads(reader.recv_bytes())
    except EOFError:
        child.join()
        raise VirtualDeviceError(
            "the process that ran the model on virtual GPUs ended before it was done: exit code "
            f"{child.exitcode}",
            hint="a code of -9 often says that the machine was short of memory",
        ) from None
    finally:
        child.kill()
        child.join()
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def _answer(writer: Connection, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it too, and ends this
    # What there was stays: a collection that looked at all of it would copy its memory.
    gc.freeze()
    # Kernels that wait for the threads of the parent's would wait forever.
    torch.set_num_threads(1)
    give_name()
    try:
        answer = pickle.dumps((function(*args, **kwargs), None))
    except Exception as error:
        answer = pickle.dumps((None, portable(error)))
    writer.send_bytes(answer)

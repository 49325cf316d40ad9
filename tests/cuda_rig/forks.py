"""Each test on the rig has a process of its own, forked before anybody has used CUDA.

So it has its own GPUs, its own allocator with its own peaks, and a torch that knows of no virtual
GPUs yet, without importing torch and transformers again.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest


def call(function: Callable[[], Any], settings: dict[str, str]) -> None:
    """Call a function in a child with settings of the rig; a failure there is one here."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of other threads: xdist's own and idle ones, whose locks nobody needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        os.close(reader)
        _answer(writer, function, settings)
    os.close(writer)
    try:
        with os.fdopen(reader, "rb") as pipe:
            told = pipe.read()
    except BaseException:  # a time limit
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not told:
        pytest.fail(f"the test's own process died with status {status}", pytrace=False)
    outcome, text = pickle.loads(told)
    if outcome == "skipped":
        pytest.skip(text)
    if outcome == "failed":
        pytest.fail(text, pytrace=False)


def _answer(writer: int, function: Callable[[], Any], settings: dict[str, str]) -> None:
    """Call it, write what came out, and end this process without pytest's own end."""
    outcome = "passed", ""
    try:
        os.environ.update(settings)
        if ctypes.CDLL(None).rig_restart():
            raise RuntimeError("pytest's own process has used CUDA: what does it at import?")
        function()
    except pytest.skip.Exception as error:
        outcome = "skipped", str(error)
    except BaseException:
        text = str(pytest.ExceptionInfo.from_current().getrepr(style="short"))
        outcome = "failed", text
    with os.fdopen(writer, "wb") as pipe:
        pipe.write(pickle.dumps(outcome))
    os._exit(0)

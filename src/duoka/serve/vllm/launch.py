"""Run vLLM as a subprocess: wait until `/health` responds, forward signals, end it at exit."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from types import FrameType

from duoka.errors import MachineError, UsageError
from duoka.planner.plan import Plan
from duoka.planner.plan_profile import cached_profile
from duoka.report.export.vllm import export
from duoka.serve.address import Address, format_url
from duoka.workers.process import WorkerProcess
from duoka.workers.signals import handle_signals

from .commands import DRAIN_SECONDS, MODULE, VllmOptions, make_command, served_name

_POLL_SECONDS, _HEALTH_SECONDS = 0.2, 5.0
# For vLLM to become healthy: large models may have to be downloaded first.
_START_SECONDS = 1800.0
# After `DRAIN_SECONDS`, for vLLM's processes to release the GPUs.
_GRACE_SECONDS = 15.0
_KEY = "VLLM_API_KEY"
# Variables for duoka's Python rather than vLLM's; and one that the plan sets if necessary.
_NOT_INHERITED = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VLLM_PP_LAYER_PARTITION")
# PR_SET_PDEATHSIG: Linux sends vLLM SIGTERM when duoka's process ends, even if it is killed.
_PROGRAM = """\
import ctypes, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
_FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,  # on which programs drain, unlike SIGHUP
}
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def serve_with_vllm(plan: Plan, options: VllmOptions, show: Callable[[str], None]) -> int:
    """Serve a model with vLLM as planned, until vLLM ends or is stopped.

    SIGINT, SIGTERM and SIGHUP are forwarded to vLLM (SIGHUP as SIGTERM), which then finishes
    running requests and accepts no new ones. Must be called in the main thread, which receives
    signals. When it returns, no process of vLLM is left.

    Parameters
    ----------
    plan : Plan
        A plan for generation on GPUs of this machine.
    options : VllmOptions
    show : callable
        Shows a line to the user.

    Returns
    -------
    int
        vLLM's exit code; 128 plus the signal's number if a signal ended it.

    Raises
    ------
    UsageError
        If vLLM can't run this plan, an option is invalid, or the address is in use.
    MachineError
        If vLLM ends before it is healthy, or doesn't become healthy in time.
    """
    profile = cached_profile(plan)
    # Check that the address is free, as another server's responses would be taken for vLLM's. Bind
    # also selects the port for port 0.
    with Address(host=options.host, port=options.port).bind() as bound:
        options = replace(options, port=bound.getsockname()[1])
    command = make_command(plan, options, profile)
    python = _find_python(options.python)
    for note in export(plan, profile).notes:
        show(note)
    inherited = {name: text for name, text in os.environ.items() if name not in _NOT_INHERITED}
    key = {} if options.api_key is None else {_KEY: options.api_key}
    environment = {**inherited, **dict(command.environment), **key}
    argv = [python, "-P", "-c", _PROGRAM, MODULE, *command.arguments]
    with _forward_signals(WorkerProcess(argv, environment=environment)) as (process, is_stopping):
        if _wait_until_healthy(process, options, is_stopping):
            for line in _describe_ready(plan, options, has_key=_KEY in environment):
                show(line)
        process.wait()
    code = _shell_exit_code(process)
    assert code is not None, "it has ended"
    return code


def _shell_exit_code(process: WorkerProcess) -> int | None:
    """Return the exit code as a shell does: 128 plus a signal's number; None while running."""
    code = process.exit_code
    return code if code is None or code >= 0 else 128 - code


def _find_python(python: Path) -> str:
    """Return the absolute path of a Python program, which may be a name on PATH."""
    program = shutil.which(os.fspath(python))
    if program is None:
        raise UsageError(
            f"{os.fspath(python)!r} is not an executable program",
            hint="give the Python of the environment with vLLM: --engine-python "
            "/opt/vllm/bin/python",
        )
    return str(Path(program).absolute())  # keep symbolic links: they identify a virtual environment


@contextmanager
def _forward_signals(process: WorkerProcess) -> Iterator[tuple[WorkerProcess, threading.Event]]:
    """Forward signals to a process inside the block; then end the process and its children.

    Yields the process and an event that the first signal sets. If the process doesn't end in time
    after the first signal, it is killed.
    """
    # vLLM drains after the first signal; it is killed with all its processes if it takes longer
    # than its --shutdown-timeout and the grace period. Further signals are forwarded, too, but
    # don't shorten that time.
    is_stopping = threading.Event()
    timer = threading.Timer(DRAIN_SECONDS + _GRACE_SECONDS, process.kill)

    def stop(signum: int, frame: FrameType | None = None) -> None:
        """Forward a signal; the first one starts the timer."""
        process.send_signal(_FORWARDED[signal.Signals(signum)])
        if not is_stopping.is_set():
            is_stopping.set()
            timer.start()

    with handle_signals(stop, _FORWARDED):
        try:
            yield process, is_stopping
        finally:
            stop(signal.SIGTERM)
            process.wait()
            timer.cancel()
            process.end()


def _wait_until_healthy(
    process: WorkerProcess, options: VllmOptions, is_stopping: threading.Event
) -> bool:
    """Return True once vLLM is healthy, or False if a signal comes earlier.

    Raises MachineError if vLLM ends, or isn't healthy in time.
    """
    deadline = time.monotonic() + _START_SECONDS
    while not is_stopping.wait(_POLL_SECONDS):
        code = _shell_exit_code(process)
        if code is not None:
            raise MachineError(
                f"vLLM ended with exit code {code} before it was ready",
                hint="see its output above; often the first error is the cause. To install vLLM: "
                f"{options.python} -m pip install 'vllm>=0.33,<0.34'",
            )
        if _is_healthy(_url_of(options)):
            return True
        if time.monotonic() > deadline:
            raise MachineError(
                f"vLLM doesn't respond at {_url_of(options)}/health after {_START_SECONDS:.0f} s, "
                "and was ended",
                hint="check that the model is downloaded",
            )
    return False


def _is_healthy(url: str) -> bool:
    """Return True if `/health` responds with 200, without using a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with (
        suppress(OSError, HTTPException),
        opener.open(f"{url}/health", timeout=_HEALTH_SECONDS) as response,
    ):
        return response.status == 200  # type: ignore[no-any-return]
    return False


def _url_of(options: VllmOptions) -> str:
    """Return the URL at which a client on this machine reaches vLLM."""
    return format_url(_ANY_ADDRESS.get(options.host, options.host), options.port)


def _describe_ready(plan: Plan, options: VllmOptions, *, has_key: bool) -> list[str]:
    """Return lines for the user: the address of vLLM, and a `curl` command for a first request."""
    url = _url_of(options)
    body = {
        "model": served_name(plan.lasting(), options),
        "messages": [{"role": "user", "content": "Hello"}],
    }
    argv = ["curl", f"{url}/v1/chat/completions"]
    argv += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    # Don't show the key: the shell expands $KEY.
    key = ' -H "Authorization: Bearer $KEY"' if has_key else ""
    return [f"vLLM is ready at {url}/v1", shlex.join(argv) + key]

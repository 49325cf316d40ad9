"""vLLM as a subprocess: ready when its `/health` answers, ended with this process."""

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

from .commands import DRAIN_SECONDS, MODULE, VllmOptions, commands, served_name

_POLL_SECONDS, _HEALTH_SECONDS = 0.2, 5.0
# Until it answers: models are large, and may have to be downloaded.
_START_SECONDS = 1800.0
# Beyond the time to drain: engines let go of their GPUs.
_GRACE_SECONDS = 15.0
_KEY = "VLLM_API_KEY"
# For duoka's Python, not for another one; and what a plan says is said anew.
_NOT_INHERITED = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VLLM_PP_LAYER_PARTITION")
# Linux tells the program where duoka's ends without a word to it (PR_SET_PDEATHSIG).
_PROGRAM = """\
import ctypes, runpy, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
_FORWARDED = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGHUP: signal.SIGTERM,  # which many programs know, and not the terminal's end
}
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def serve_with_vllm(plan: Plan, options: VllmOptions, show: Callable[[str], None]) -> int:
    """Serve a model with vLLM as planned, until vLLM ends or is stopped.

    The commands of further machines are shown first. SIGINT, SIGTERM and SIGHUP are forwarded to
    vLLM, which then answers what it has begun and takes nothing new. To be called in the main
    thread, where signals are; when it returns no process is left.

    Parameters
    ----------
    plan : Plan
        For generating; of GPUs that are here, or on the machines of `options`.
    options : VllmOptions
    show : callable
        Shows a line to a person.

    Returns
    -------
    int
        vLLM's exit code; 128 and a signal's number where that ended it.

    Raises
    ------
    UsageError
        If vLLM can't be told this plan, an option is wrong, or the address is taken.
    MachineError
        If vLLM ends before it answers, or doesn't answer in time.
    """
    profile = cached_profile(plan)
    # Another server's answers would be taken for vLLM's.
    with Address(host=options.host, port=options.port).bind() as bound:
        options = replace(options, port=bound.getsockname()[1])
    head, *remote = commands(plan, options, profile)
    python = _find_python(options.python)
    for note in export(plan, profile).notes:
        show(note)
    for command in remote:
        show(f"run this on {command.address}, with the model at the same path:")
        show(command.shell_text(Path(python)))
    inherited = {name: text for name, text in os.environ.items() if name not in _NOT_INHERITED}
    key = {} if options.api_key is None else {_KEY: options.api_key}
    environment = {**inherited, **dict(head.environment), **key}
    words = [python, "-P", "-c", _PROGRAM, MODULE, *head.arguments]
    with _running(WorkerProcess(words, environment=environment)) as (process, is_stopping):
        if _wait_until_healthy(process, options, is_stopping):
            for line in _welcome(plan, options, has_key=_KEY in environment):
                show(line)
        process.wait()
    code = _shell_exit_code(process)
    assert code is not None, "it has ended"
    return code


def _shell_exit_code(process: WorkerProcess) -> int | None:
    """Return the exit code as a shell does: 128 and the number of a signal."""
    code = process.exit_code
    return code if code is None or code >= 0 else 128 - code


def _find_python(python: Path) -> str:
    program = shutil.which(os.fspath(python))
    if program is None:
        raise UsageError(
            f"{os.fspath(python)!r} is not an executable program",
            hint="give the Python of the environment with vLLM: --engine-python "
            "/opt/vllm/bin/python",
        )
    return str(Path(program).absolute())  # links stay, since they tell a virtual environment


@contextmanager
def _running(process: WorkerProcess) -> Iterator[tuple[WorkerProcess, threading.Event]]:
    """Forward signals to a running process, and end the process and its children at last.

    It is killed where it doesn't end in time after the first signal, which sets the event.
    """
    # vLLM drains after the first signal, and is killed with all its engines where it takes longer
    # than it says. Further signals reach it as well; they don't shorten that time.
    is_stopping = threading.Event()
    timer = threading.Timer(DRAIN_SECONDS + _GRACE_SECONDS, process.kill)

    def stop(signum: int, frame: FrameType | None = None) -> None:
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
    """Wait until vLLM answers; return False where a signal comes earlier."""
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
                hint="check that the commands on the other machines are running, and that the "
                "model is downloaded",
            )
    return False


def _is_healthy(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with (
        suppress(OSError, HTTPException),
        opener.open(f"{url}/health", timeout=_HEALTH_SECONDS) as response,
    ):
        return response.status == 200  # type: ignore[no-any-return]
    return False


def _url_of(options: VllmOptions) -> str:
    """Return where a client on this machine reaches vLLM."""
    return format_url(_ANY_ADDRESS.get(options.host, options.host), options.port)


def _welcome(plan: Plan, options: VllmOptions, *, has_key: bool) -> list[str]:
    """Return the address of vLLM and a `curl` command, for a person."""
    url = _url_of(options)
    body = {
        "model": served_name(plan.lasting(), options),
        "messages": [{"role": "user", "content": "Hello"}],
    }
    words = ["curl", f"{url}/v1/chat/completions"]
    words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    # The key is not shown; a shell puts it in.
    key = ' -H "Authorization: Bearer $KEY"' if has_key else ""
    return [f"vLLM is ready at {url}/v1", shlex.join(words) + key]

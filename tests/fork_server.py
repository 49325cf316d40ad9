"""A process that has imported torch and transformers, and whose forks are programs.

Each of them would take seconds to import the same. Their engines warm up as those of the tests do.
What is tested about a start itself starts the real way.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import io
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

_TESTS = str(Path(__file__).parent)
if __name__ == "__main__":
    sys.path.insert(0, _TESTS)

from fork_client import NUMBER_BYTES, receive  # noqa: E402

_MOST_FILES = 64
_PRELOAD = (
    "duoka.cli.main",
    "duoka.tuner.tune",
    "duoka.tuner.worker",
    "duoka.engine.stage_worker",
    "duoka.serve.engine_process",
    "duoka.tools.bench.measure",
    "torch.distributed.run",
    "transformers.models.llama.modeling_llama",
    "peft.tuners.lora",
    "uvicorn.server",
)


def forking_python(directory: Path, run: int) -> Path:
    """Return a program that is called as Python is.

    Processes that name the same directory share the server. It ends with `run`, a process.
    """
    address, client = directory / "socket", directory / "python"
    try:
        directory.mkdir()
    except FileExistsError:
        while not client.exists():
            time.sleep(0.01)
        return client
    with socket.socket(socket.AF_UNIX) as listener, (directory / "log").open("w") as log:
        # Clients that come early wait.
        listener.bind(str(address))
        listener.listen()
        subprocess.run(
            [sys.executable, __file__, str(listener.fileno()), str(client), str(run)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[listener.fileno()],
            start_new_session=True,
            check=True,
        )
    begun = directory / "begun"
    begun.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {_TESTS!r})\n"
        f"import fork_client\nfork_client.main({str(address)!r})\n"
    )
    begun.chmod(0o700)
    begun.rename(client)
    return client


def serve(listener: socket.socket, client_path: str, run: int) -> None:
    """Run a program for each connection, while `run` lasts."""
    end = os.pidfd_open(run)
    if os.fork():
        os._exit(0)  # nobody waits for the server
    with importlib.import_module("duoka.base.quiet").quiet_libraries():  # CUDA must not start
        for name in _PRELOAD:
            importlib.import_module(name)
    capacity = importlib.import_module("duoka.forecast.serving").Capacity
    capacity.warm_up_steps = importlib.import_module("warm_up").largest_step
    sys.executable = client_path  # what programs start is a fork, too
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, end], [], [])
        if end in ready:
            return
        client, _ = listener.accept()
        if not os.fork():
            listener.close()
            os.close(end)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _run(client)
        client.close()


def _run(client: socket.socket) -> None:
    """Start a program, say how it ends, and end it where its client is gone."""
    head, files, _, _ = socket.recv_fds(client, NUMBER_BYTES, _MOST_FILES)
    request = receive(client, int.from_bytes(head, "big"))
    program = os.fork()
    if not program:
        client.close()
        _become(files, *marshal.loads(request))
    for file in files:
        os.close(file)
    client.sendall(program.to_bytes(NUMBER_BYTES, "big"))
    end = os.pidfd_open(program)
    ready, _, _ = select.select([end, client], [], [])
    if end not in ready:
        os.kill(program, signal.SIGKILL)
    _, status, usage = os.wait4(program, 0)
    code = os.waitstatus_to_exitcode(status)
    seconds = usage.ru_utime + usage.ru_stime
    sys.stdout.write(f"{code}, {seconds:.2f} s of a processor: {request!r:.200}\n")
    if end in ready:
        client.sendall(code.to_bytes(NUMBER_BYTES, "big", signed=True))
    sys.stdout.flush()
    os._exit(0)


def _become(
    files: Sequence[int],
    numbers: Sequence[int],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    directory: str,
) -> None:
    """Be the program, to its end."""
    os.setsid()
    # Out of the way of the numbers that they are to have.
    away = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(numbers, away, strict=True):
        os.dup2(file, number)
        os.close(file)
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8")
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)),
        "utf-8",
        "backslashreplace",
        line_buffering=True,
    )
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        _run_as_python(arguments)
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run_as_python(arguments: Sequence[str]) -> None:
    """Run what the arguments name: ``-m module``, ``-c code``, or a file."""
    options = [argument for argument in arguments if argument != "-u"]
    kind, *rest = options
    sys.argv = ["-c", *rest[1:]] if kind == "-c" else rest if kind == "-m" else options
    if kind == "-m":
        sys.path[0] = str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.path[0] = ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = str(Path(kind).parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], int(sys.argv[3]))

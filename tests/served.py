"""A real server for tests: `duoka serve` in a process of its own, on virtual GPUs."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_START_SECONDS, _END_SECONDS = 180, 60
_STOPPED = 128 + signal.SIGTERM
_GPUS = ("--gpus", "virtual:1x256MiB", "--context", "128", "--sequences", "4")


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server that answers.

    Parameters
    ----------
    url : str
        Where, without a path.
    model : str
        Its name for clients.
    directory : Path
        Its checkpoint.
    process : Popen
        Of ``duoka serve``, or its proxy: see `serving`.
    pid : int
        That of ``duoka serve``.
    log : Path
        What it has written to the standard error.
    """

    url: str
    model: str
    directory: Path
    process: subprocess.Popen[str]
    pid: int
    log: Path


@contextlib.contextmanager
def serving(
    directory: Path,
    log: Path,
    *options: str,
    gpus: Sequence[str] = _GPUS,
    environment: dict[str, str] | None = None,
    python: str | Path = sys.executable,
) -> Iterator[Served]:
    """Serve a checkpoint on a port that is free; the server is told to stop at the end.

    Its exit is checked where the test hasn't ended it. With `forking_python` the server and its
    engine are forks, whose process is a proxy.
    """
    program = (  # a run of tests in the background may leave Ctrl-C ignored
        "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "print(os.getpid(), flush=True); from duoka.cli import main; main()"
    )
    command = [python, "-c", program, "serve", str(directory), *gpus, "--port", "0"]
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [*command, *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **(environment or {})},
        ) as process,
    ):
        assert process.stdout is not None
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            pid = int(_line(lines))
            url = _url(lines, log)
            yield Served(
                url=url,
                model=directory.name,
                directory=directory,
                process=process,
                pid=pid,
                log=log,
            )
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(_END_SECONDS) == _STOPPED, log.read_text()
        finally:
            process.kill()
            process.wait()
            reader.join()


def _read(stream: Iterator[str], lines: queue.Queue[str]) -> None:
    """Keep the pipe empty; an empty line is its end."""
    for line in stream:
        lines.put(line)
    lines.put("")


def _line(lines: queue.Queue[str]) -> str:
    try:
        return lines.get(timeout=_START_SECONDS)
    except queue.Empty:
        return ""


def _url(lines: queue.Queue[str], log: Path) -> str:
    """The address that is printed when requests are answered."""
    line = _line(lines)
    assert line.startswith("http"), f"the server printed {line!r}: {log.read_text()}"
    return line.split()[0]

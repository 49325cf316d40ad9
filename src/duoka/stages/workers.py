"""Worker processes: one for each rank, started on this machine, watched, and ended together.

A worker knows its rank and the others from the environment variables that torchrun sets as well.
Its standard input is a pipe from the parent: where the parent is gone, it ends too.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType

import torch.distributed as dist

_POLL_SECONDS = 0.1
# After one has failed the others notice by themselves, or they are ended.
_GRACE_SECONDS = 10.0
_SETTINGS = {
    # As PyTorch 2.13 has it and 2.11 hasn't: products with a bias take no workspace of their own,
    # which no forecast knows of.
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1",
    # PyTorch logs that memory ran out beside raising it.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class Workers:
    """Processes that run a Python module, one for each rank.

    `descriptors` are files that each of them has open as well; the number of the first one is its
    last argument.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        number: int,
        *,
        threads: int | None = None,
        descriptors: Sequence[Sequence[int]] | None = None,
    ) -> None:
        threads = threads or max(1, len(os.sched_getaffinity(0)) // number)
        # Their store is here: a free port that one of them were told of could be taken by then.
        store = dist.TCPStore  # type: ignore[attr-defined]  # public, though not in its types
        self._store = store("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "WORLD_SIZE": str(number),
            "LOCAL_WORLD_SIZE": str(number),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            # All are on this machine, whatever its name resolves to.
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _loopback()),
            **{name: os.environ.get(name, value) for name, value in _SETTINGS.items()},
        }
        command = [sys.executable, "-m", module, *arguments]
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(number):
                ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                files = descriptors[rank] if descriptors else ()
                self._processes.append(_start(command, {**shared, **ranks}, files))
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def wait(self) -> dict[int, int]:
        """Wait for all; the exit codes of those that failed first, by rank. The others are ended.

        A negative code is the signal that ended a process.
        """
        while True:
            codes = {rank: process.poll() for rank, process in enumerate(self._processes)}
            if any(codes.values()):
                # One that was killed takes others with it within moments.
                self.end(_GRACE_SECONDS)
                return {rank: code for rank, code in codes.items() if code}
            if None not in codes.values():
                return {}
            time.sleep(_POLL_SECONDS)

    def codes(self, grace_seconds: float) -> dict[int, int]:
        """The exit codes, by rank, of those that have ended or do so within so many seconds."""
        deadline = time.monotonic() + grace_seconds
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        codes = {rank: process.poll() for rank, process in enumerate(self._processes)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def ask_to_stop(self) -> None:
        """Send SIGTERM to all: they save what they have, and leave."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def end(self, grace_seconds: float = 0.0) -> None:
        """Let nothing of them be left, at the latest after so many seconds."""
        deadline = time.monotonic() + grace_seconds
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()


def describe_end(code: int | None) -> str:
    """How a process has ended, by its exit code."""
    if code is None:
        return "its connection was lost"
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def end_with_parent() -> None:
    """In a worker: end when the process that started it is gone, however it went."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _start(
    command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    numbers = [str(descriptors[0])] if descriptors else []
    # In a group of its own: Ctrl-C reaches the parent alone, which tells the workers. Where that is
    # gone the kernel wakes a group of the same session that is stopped, so that it can end.
    return subprocess.Popen(
        [*command, *numbers],
        env=environment,
        stdin=subprocess.PIPE,
        process_group=0,
        pass_fds=descriptors,
    )


def _loopback() -> str:
    """The name of the network interface that leads to this machine."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name.startswith("lo")), names[0])

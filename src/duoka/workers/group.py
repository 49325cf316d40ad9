"""A group of worker processes on this machine, watched and ended together."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import Pipe

from .process import WorkerProcess, describe_exit, wait_for_all
from .worker import LOST

_POLL_SECONDS = 0.1
# Seconds for other workers to notice the loss of one by themselves before they are killed; and to
# wait for their exit codes in `find_loss`.
_GRACE_SECONDS = 10.0
_LOSS_SECONDS = 2.0
_SETTINGS = {
    # The default of PyTorch 2.13 but not of 2.11: matrix products with a bias allocate no separate
    # workspace, which the forecast doesn't include.
    "TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1",
    # Otherwise PyTorch logs an out-of-memory error that it also raises.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class WorkerGroup:
    """Processes of one Python module, each with a rank.

    A worker reads its rank from the environment variables of torchrun (RANK, WORLD_SIZE, …).

    Parameters
    ----------
    module : str
        The module to run with ``python -m``.
    size : int
        The number of workers.
    arguments : sequence of str
        Command-line arguments of each worker.
    threads : int, optional
        CPU threads of PyTorch in each process; by default the CPUs are shared equally.
    environment : mapping of str to str, optional
        Variables in addition to those of this process.
    descriptors : sequence of sequence of int, optional
        For each rank, open file descriptors that the worker inherits.
    has_channels : bool
        Open a channel to each worker: `channels[rank]` is the parent's end; the file descriptor of
        the worker's end is the worker's last argument.

    Raises
    ------
    OSError
        If a process can't be started; those started before have been ended.
    """

    def __init__(
        self,
        module: str,
        size: int,
        arguments: Sequence[str] = (),
        *,
        threads: int | None = None,
        environment: Mapping[str, str] | None = None,
        descriptors: Sequence[Sequence[int]] | None = None,
        has_channels: bool = False,
    ) -> None:
        threads = threads or max(1, len(os.sched_getaffinity(0)) // size)
        defaults = {"OMP_NUM_THREADS": str(threads), **_SETTINGS}
        sizes = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
        shared = {**defaults, **os.environ, **(environment or {}), **sizes}
        command = [sys.executable, "-m", module, *arguments]
        pipes = [Pipe() for _ in range(size if has_channels else 0)]
        self.channels = [parent_end for parent_end, _ in pipes]
        self._processes: list[WorkerProcess] = []
        with ExitStack() as on_failure, ExitStack() as for_workers:
            # If a worker can't be started, the earlier ones are ended. The parent closes the
            # workers' ends of the channels, as it would otherwise not notice the end of a worker.
            on_failure.callback(self.end)
            for _, worker_end in pipes:
                for_workers.enter_context(worker_end)
            for rank in range(size):
                ends = [pipes[rank][1].fileno()] if has_channels else []
                process = WorkerProcess(
                    [*command, *map(str, ends)],
                    environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    descriptors=[*ends, *(descriptors[rank] if descriptors else ())],
                )
                self._processes.append(process)
            on_failure.pop_all()

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def wait(self) -> dict[int, int]:
        """Wait until all workers have ended; after the first failure, end the others.

        Returns
        -------
        dict of int to int
            The nonzero exit codes of the workers that failed first, by rank; empty if none failed.
            A negative code is the negated number of the signal that ended the process.
        """
        while True:
            codes = self.exit_codes()
            if failures := {rank: code for rank, code in codes.items() if code}:
                self.end(_GRACE_SECONDS)
                return failures
            if len(codes) == len(self._processes):
                return {}
            time.sleep(_POLL_SECONDS)

    def exit_codes(self, wait_seconds: float = 0.0) -> dict[int, int]:
        """Wait for the workers at most so long; return the exit codes of ended ones, by rank."""
        codes = wait_for_all(self._processes, wait_seconds)
        return {rank: code for rank, code in enumerate(codes) if code is not None}

    def find_loss(self, rank: int) -> tuple[int, str]:
        """Find the worker whose end broke the channel of a rank, and describe its end.

        Closes the channels, so that all workers end. Workers that end because of another one have
        the exit code `LOST`.

        Returns
        -------
        culprit : int
            The rank of the worker that ended first; `rank` if the exit codes don't show it.
        ending : str
            A description of its exit code.
        """
        # The loss of one worker breaks channels of other workers, which may be noticed first. If
        # rank 1 of three was killed, the exit codes are {0: LOST, 1: -9, 2: LOST}: rank 1 it is.
        self._close_channels()
        codes = self.exit_codes(_LOSS_SECONDS)
        culprit = next((rank for rank, code in codes.items() if code not in (0, LOST)), rank)
        return culprit, describe_exit(codes.get(culprit))

    def terminate(self) -> None:
        """Send SIGTERM to all workers, which then save their state and exit."""
        for process in self._processes:
            process.send_signal(signal.SIGTERM)

    def end(self, grace_seconds: float = 0.0) -> None:
        """Close the channels, and kill the remaining workers after the grace period."""
        self._close_channels()
        wait_for_all(self._processes, grace_seconds)
        for process in self._processes:
            process.end()

    def _close_channels(self) -> None:
        """Close the parent's ends of the channels."""
        for channel in self.channels:
            channel.close()

"""The executor of a plan on several devices: a worker process for the stages of each device.

The driver (this process) has neither weights nor a GPU. It sends each step to every worker, and
receives the outcome from the last stage. Several steps are in flight, in different stages. If a
worker is lost or stops responding, the other workers and the executor end.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain, count
from multiprocessing.connection import wait

from duoka.base.files import why
from duoka.errors import GpuLostError, MachineError
from duoka.forecast.serving import FIRST, Capacity, StepSize, WarmUp
from duoka.models.lora import LoraAdapter
from duoka.planner.plan import Plan
from duoka.report.measured import Fallback, PeakBytes
from duoka.runtime.call.chunk import Chunk
from duoka.stages.route import Routes
from duoka.stages.shared_memory import SharedMemory, connect
from duoka.workers import supervision
from duoka.workers.channel import open_result
from duoka.workers.group import WorkerGroup
from duoka.workers.supervision import LOOK_SECONDS, SilenceCounter

from .executor import Result
from .stage_worker import EngineStep, StageReport, WorkerSettings

_MODULE = "duoka.engine"
# Without any report from a worker for this long, a step counts as hanging: `_TIMES` the forecast
# time to first token, at least `_MIN_SECONDS`; `_UNKNOWN_SECONDS` without a forecast.
_TIMES, _MIN_SECONDS, _UNKNOWN_SECONDS = 100.0, 60.0, 900.0
_GRACE_SECONDS = 2.0
# Before its first heartbeat a worker imports torch, which can take long on a slow disk.
_IMPORT_SECONDS = 300.0


class WorkerError(MachineError):
    """A worker process was lost or is silent, or a step hangs."""


# Three stages on three GPUs. The driver sends a step to every worker; activations are sent from
# stage to stage, and the last stage samples tokens and sends them back:
#
#     driver ── step n ──▶ worker 0    worker 1    worker 2
#                          stage 0 ──▶ stage 1 ──▶ stage 2 ── tokens of step n ──▶ driver
#
# `submit` doesn't wait: up to `num_steps` steps are in flight. Each worker computes the steps of a
# stage in the order of submission, so results come in that order, too. A slot in shared memory is
# reused `num_steps` steps later, when the result of the step that used it has arrived.
class StagedExecutor:
    """Computes steps in one worker process per device; see `Executor`.

    Parameters
    ----------
    plan : Plan
        A proved plan for several devices.
    capacity : Capacity
    routes : Routes
        The tensors sent between stages in a step, by step size.
    warm_up : {"first", "largest", "every"}
        The steps to run before the first request.
    trust_remote_code, adapter
        As for `load`.

    Raises
    ------
    DuokaError
        The error of a worker that can't load its stages.
    MachineError
        If processes can't be started, or a warm-up step fails.
    """

    is_paged = True
    runs_ahead = False

    def __init__(
        self,
        plan: Plan,
        capacity: Capacity,
        routes: Routes,
        *,
        warm_up: WarmUp = "first",
        trust_remote_code: bool = False,
        adapter: LoraAdapter | None = None,
    ) -> None:
        self.capacity = replace(capacity, whole_prompts=False)
        self.num_steps = len(plan.devices)
        self._plan = plan
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._step_limit = _step_limit_seconds(plan)
        self._numbers = count()
        self._failures: dict[int, Exception] = {}
        self._results, self._fallbacks = deque[Result](), set[Fallback]()
        # The number of steps in flight, and when a step was last submitted or reported on.
        self._num_in_flight, self._last_activity_at = 0, 0.0
        # The heartbeats when last all of them had changed, and for how long one of them hasn't.
        self._beats: list[int] = []
        self._silence, self._next_look = SilenceCounter(), 0.0
        self._resources = ExitStack()
        try:
            self._memory = self._shared_memory(routes)
            self._resources.callback(self._memory.close)
            settings = WorkerSettings(
                plan=plan,
                trust_remote_code=trust_remote_code,
                adapter=adapter,
                capacity=self.capacity,
                routes=routes,
                memory=self._memory,
            )
            self._load_workers(settings, self._start_workers(len(plan.devices)))
            self._run_trial_step(FIRST)
            for size in self.capacity.warm_up_steps(warm_up, self._reserved_bytes):
                self._run_trial_step(size)
            for size in self.capacity.graph_steps():
                self._run_trial_step(size, is_graph=True)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise MachineError(
                f"the processes of {', '.join(plan.devices)} can't be started: {why(error)}",
                hint="check the limits of processes and open files: `ulimit -u -n`",
            ) from error

    def start(self) -> None:
        """See `Executor`; the constructor has warmed up the workers already."""

    def _shared_memory(self, routes: Routes) -> SharedMemory:
        """Allocate shared memory for the largest step."""
        capacity = self.capacity
        most_tokens = capacity.tokens(max(capacity.step_tokens, capacity.sequences))
        largest = routes.at(most_tokens, capacity.logits(capacity.sequences))
        return SharedMemory(largest, self.num_steps, len(self._plan.devices))

    def _start_workers(self, number: int) -> list[list[int]]:
        """Start the workers; return the descriptors of each rank's sockets to the other ranks."""
        with ExitStack() as for_workers:
            sockets = connect(number)
            descriptors = [[end for end in ends if end >= 0] for ends in sockets]
            for end in chain(*descriptors):
                for_workers.callback(os.close, end)
            for ends in descriptors:
                ends.append(self._memory.descriptor)
            self._workers = WorkerGroup(_MODULE, number, descriptors=descriptors, has_channels=True)
            self._drivers = self._workers.channels
            self._resources.callback(self._end_workers)
        return sockets

    def submit(
        self, chunks: Sequence[Chunk], size: StepSize | None = None, *, is_graph: bool = False
    ) -> None:
        """See `Executor`; with a size and no chunks, submit a trial step (see `EngineStep`)."""
        message = pickle.dumps(EngineStep(next(self._numbers), chunks, size, is_graph))
        self._num_in_flight, self._last_activity_at = self._num_in_flight + 1, time.monotonic()
        with suppress(OSError):  # a worker is lost; `wait` raises the error
            for driver in self._drivers:
                driver.send_bytes(message)

    def wait(self) -> Result | None:
        """See `Executor`.

        Raises
        ------
        WorkerError
            If a worker has ended or doesn't respond, or a step hangs.
        GpuLostError
            If the GPU of a worker has failed.
        """
        try:
            return self._wait()
        except BaseException:
            self._resources.close()
            raise

    def _wait(self) -> Result | None:
        """Do the work of `wait`, without closing resources after an error."""
        while not self._results:
            ready = wait([*self._drivers, self._woken], LOOK_SECONDS)
            for rank, driver in enumerate(self._drivers):
                if driver in ready:
                    self._receive_report(rank)
            self._check_workers()
            if self._woken in ready:
                os.read(self._woken, 2**16)
                if not self._results:
                    return None
        self._num_in_flight -= 1
        return self._results.popleft()

    def _check_workers(self) -> None:
        """Raise WorkerError if a worker doesn't respond, or a step takes too long."""
        now = time.monotonic()
        if now < self._next_look:
            return
        # Each worker increments its heartbeat in shared memory four times a second. `_beats` are
        # the heartbeats at the last check at which all had changed. A worker with the same
        # heartbeat is silent, even if its channel is open and other workers continue.
        self._next_look = now + LOOK_SECONDS
        beats = self._memory.beats()
        silent = [rank for rank, beat in enumerate(self._beats) if beat == beats[rank]]
        seconds = self._silence.count(is_alive=not silent)
        if not silent:
            self._beats = beats
        elif seconds >= (supervision.SILENT_SECONDS if all(beats) else _IMPORT_SECONDS):
            raise WorkerError(
                f"the process of {self._plan.devices[silent[0]]} hasn't responded for "
                f"{seconds:.0f} seconds",
                hint="check whether it was stopped (SIGSTOP), or the machine is swapping",
            )
        if self._num_in_flight and now - self._last_activity_at > self._step_limit:
            raise WorkerError(
                f"a step hasn't finished within {self._step_limit:.0f} seconds",
                hint="check the state of the GPUs and other programs on them: `nvidia-smi`",
            )

    def wake(self) -> None:
        """See `Executor`."""
        with suppress(BlockingIOError):  # the pipe is full, so `wait` will return anyway
            os.write(self._waker, b"!")

    def forget(self, sequence: int) -> None:
        """See `Executor`; no state is kept for a sequence besides its pages."""

    def busy_seconds(self) -> dict[str, float]:
        """See `Executor`; from shared memory, since the workers were started."""
        pairs = zip(self._plan.devices, self._memory.notes(), strict=True)
        return {device: notes.busy_seconds for device, notes in pairs}

    def peaks(self) -> list[PeakBytes]:
        """See `Executor`."""
        pairs = zip(self._plan.devices, self._memory.notes(), strict=True)
        return [
            PeakBytes(
                device=device,
                allocated_bytes=notes.allocated_bytes,
                reserved_bytes=notes.reserved_bytes,
            )
            for device, notes in pairs
            if notes.reserved_bytes
        ]

    def fallbacks(self) -> list[Fallback]:
        """See `Executor`."""
        return sorted(self._fallbacks)

    def _end_workers(self) -> None:
        """Tell the workers to end, and kill those that are left after the grace period."""
        for driver in self._drivers:
            with suppress(OSError):
                driver.send(None)
        self._workers.end(_GRACE_SECONDS)

    def close(self) -> None:
        """See `Executor`."""
        self._resources.close()
        os.close(self._waker)
        os.close(self._woken)

    def _load_workers(self, settings: WorkerSettings, sockets: Sequence[Sequence[int]]) -> None:
        """Send the settings to the workers, wait until all have loaded; raise a worker's error."""
        for rank, driver in enumerate(self._drivers):
            with self._raising_losses(rank):
                driver.send_bytes(pickle.dumps((settings, rank, sockets[rank])))
        for rank, driver in enumerate(self._drivers):
            with self._raising_losses(rank):
                while not driver.poll(LOOK_SECONDS):
                    self._check_workers()
                message = driver.recv()
            open_result(message)

    def _run_trial_step(self, size: StepSize, *, is_graph: bool = False) -> None:
        """Run a trial step (see `EngineStep`); raise MachineError if it fails."""
        self.submit([], size, is_graph=is_graph)
        while (result := self._wait()) is None:
            pass  # woken by a request that is already queued
        if isinstance(result, Exception):
            raise MachineError(
                f"a step of {size.tokens} tokens fails: {str(result)[:300]}",
                hint="free the memory that other programs use, or plan for fewer concurrent "
                "requests (--sequences) or smaller steps (--prefill-chunk)",
            ) from result

    def _reserved_bytes(self) -> int:
        """Return the peak bytes reserved on all devices together."""
        return sum(notes.reserved_bytes for notes in self._memory.notes())

    def _receive_report(self, rank: int) -> None:
        """Receive a worker's report; add the step's result if it is from the last stage.

        Raises GpuLostError if that is what the worker reports.
        """
        with self._raising_losses(rank):
            report: StageReport | Fallback = self._drivers[rank].recv()
        self._last_activity_at = time.monotonic()
        if isinstance(report, Fallback):
            self._fallbacks.add(report)
            return
        if isinstance(report.outcome, GpuLostError):
            raise report.outcome
        if isinstance(report.outcome, Exception):
            self._failures.setdefault(report.number, report.outcome)
        if not report.is_last:
            return
        # A failing earlier stage reports before the last stage does, but on another channel. So
        # read the other channels before the last stage's outcomes become the result.
        for peer, driver in enumerate(self._drivers):
            while peer != rank and driver.poll():
                self._receive_report(peer)
        self._results.append(self._failures.pop(report.number, report.outcome))

    @contextmanager
    def _raising_losses(self, rank: int) -> Iterator[None]:
        """Raise WorkerError with the lost device if a rank's channel breaks inside the block."""
        try:
            yield
        except (EOFError, OSError) as error:
            culprit, ending = self._workers.find_loss(rank)
            raise WorkerError(
                f"the process of {self._plan.devices[culprit]} has ended: {ending}",
                hint="see its standard error output; if CPU memory ran out, `dmesg` shows that "
                "the kernel killed it",
            ) from error


def _step_limit_seconds(plan: Plan) -> float:
    """Return the seconds without a report after which a step counts as hanging; see `_TIMES`."""
    seconds = plan.forecast.seconds
    if seconds is None or seconds.first_token_seconds is None:
        return _UNKNOWN_SECONDS
    return max(_MIN_SECONDS, _TIMES * seconds.first_token_seconds)

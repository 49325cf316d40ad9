"""The executor of a plan on several devices: a worker process for the stages of each device.

The driver, this process, has neither weights nor a GPU: it sends each step to every worker, and
receives the outcome from the last stage. Steps follow one another through the stages. The loss of a
worker, or its silence, ends the other workers and the executor.
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
from duoka.report.measured import PeakBytes
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
# A step that takes so many times as long as reading all prompts at once does by the forecast hangs;
# and one that takes so many seconds where that is less, or nothing is forecast.
_TIMES, _MIN_SECONDS, _UNKNOWN_SECONDS = 100.0, 60.0, 900.0
_GRACE_SECONDS = 2.0
# Before its first sign of life a process imports torch, which can take long on a slow disk.
_IMPORT_SECONDS = 300.0


class WorkerError(MachineError):
    """The loss of a worker of the engine, or a step without an end."""


# Three stages on three GPUs. A step goes to every worker; hidden states go from stage to stage, and
# tokens come back, which the last stage has sampled:
#
#     driver ── step n ──▶ worker 0    worker 1    worker 2
#                          stage 0 ──▶ stage 1 ──▶ stage 2 ── tokens of step n ──▶ driver
#
# `submit` doesn't wait: up to `num_steps` steps are in flight. Each worker computes a stage's steps
# in the order in which they were sent, so results come in that order, too. A place in shared memory
# is used again `num_steps` steps later, when the step that used it has had its result.
class StagedExecutor:
    """Computes steps in a process for each device; see `Executor`.

    Parameters
    ----------
    plan : Plan
        Of several devices, proved.
    capacity : Capacity
    routes : Routes
        Of the model's steps.
    warm_up : {"first", "largest", "every"}
        Which steps are computed before anybody asks.
    trust_remote_code, adapter
        As for `load`; the adapter in native form.

    Raises
    ------
    DuokaError
        Why a process couldn't load its part.
    """

    is_paged = True

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
        self._results: deque[Result] = deque()
        # Steps on their way, and when one was last heard of.
        self._num_open, self._heard_at = 0, 0.0
        # Signs of life as they were when all had changed, and for how long one hasn't.
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
            self._load(settings, self._start_workers(len(plan.devices)))
            self._try_out(FIRST)
            for size in self.capacity.warm_up_steps(warm_up, self._reserved_bytes):
                self._try_out(size)
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise MachineError(
                f"the processes of {', '.join(plan.devices)} can't be started: {why(error)}",
                hint="check the limits of processes and open files: `ulimit -u -n`",
            ) from error

    def start(self) -> None:
        """See `Executor`: the processes have warmed up."""

    def _shared_memory(self, routes: Routes) -> SharedMemory:
        """Allocate the shared memory for the largest step."""
        capacity = self.capacity
        most_tokens = capacity.tokens(max(capacity.step_tokens, capacity.sequences))
        largest = routes.at(most_tokens, capacity.logits(capacity.sequences))
        return SharedMemory(largest, self.num_steps, len(self._plan.devices))

    def _start_workers(self, number: int) -> list[list[int]]:
        """Start the workers; return the sockets between them, by rank."""
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

    def submit(self, chunks: Sequence[Chunk], size: StepSize | None = None) -> None:
        """See `Executor`; with a size, compute a step of padding."""
        message = pickle.dumps(EngineStep(next(self._numbers), chunks, size))
        self._num_open, self._heard_at = self._num_open + 1, time.monotonic()
        with suppress(OSError):  # a process is gone, which `wait` tells
            for driver in self._drivers:
                driver.send_bytes(message)

    def wait(self) -> Result | None:
        """See `Executor`.

        Raises
        ------
        WorkerError
            If a process has ended or is stopped, or a step doesn't end.
        GpuLostError
            If the GPU of a process has failed.
        """
        try:
            return self._wait()
        except BaseException:
            self._resources.close()
            raise

    def _wait(self) -> Result | None:
        while not self._results:
            ready = wait([*self._drivers, self._woken], LOOK_SECONDS)
            for rank, driver in enumerate(self._drivers):
                if driver in ready:
                    self._take(rank)
            self._look()
            if self._woken in ready:
                os.read(self._woken, 2**16)
                if not self._results:
                    return None
        self._num_open -= 1
        return self._results.popleft()

    def _look(self) -> None:
        """Raise WorkerError where a worker is silent, or a step takes too long."""
        now = time.monotonic()
        if now < self._next_look:
            return
        # Each worker changes a number in shared memory four times a second. `_beats` has those of
        # the last look at which all had changed: a worker whose number is the same is silent, also
        # where its channel is open and other workers go on.
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
        if self._num_open and now - self._heard_at > self._step_limit:
            raise WorkerError(
                f"a step hasn't finished within {self._step_limit:.0f} seconds",
                hint="check the state of the GPUs and other programs on them: `nvidia-smi`",
            )

    def wake(self) -> None:
        """See `Executor`."""
        with suppress(BlockingIOError):  # it has been woken often enough
            os.write(self._waker, b"!")

    def forget(self, sequence: int) -> None:
        """See `Executor`: nothing is kept of a sequence but its pages."""

    def busy_seconds(self) -> dict[str, float]:
        """See `Executor`: since the processes were started."""
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

    def _end_workers(self) -> None:
        for driver in self._drivers:
            with suppress(OSError):
                driver.send(None)
        self._workers.end(_GRACE_SECONDS)

    def close(self) -> None:
        """See `Executor`."""
        self._resources.close()
        os.close(self._waker)
        os.close(self._woken)

    def _load(self, settings: WorkerSettings, sockets: Sequence[Sequence[int]]) -> None:
        for rank, driver in enumerate(self._drivers):
            with self._watched(rank):
                driver.send_bytes(pickle.dumps((settings, rank, sockets[rank])))
        for rank, driver in enumerate(self._drivers):
            with self._watched(rank):
                while not driver.poll(LOOK_SECONDS):
                    self._look()
                message = driver.recv()
            open_result(message)

    def _try_out(self, size: StepSize) -> None:
        self.submit([], size)
        while (result := self._wait()) is None:
            pass  # somebody asks already
        if isinstance(result, Exception):
            raise MachineError(
                f"a step of {size.tokens} tokens fails: {str(result)[:300]}",
                hint="free the memory that other programs use, or plan for fewer concurrent "
                "requests (--sequences) or smaller steps (--prefill-chunk)",
            ) from result

    def _reserved_bytes(self) -> int:
        return sum(notes.reserved_bytes for notes in self._memory.notes())

    def _take(self, rank: int) -> None:
        """Take the report of a worker."""
        with self._watched(rank):
            report: StageReport = self._drivers[rank].recv()
        self._heard_at = time.monotonic()
        if isinstance(report.outcome, GpuLostError):
            raise report.outcome
        if isinstance(report.outcome, Exception):
            self._failures.setdefault(report.number, report.outcome)
        if not report.is_last:
            return
        # An earlier stage that fails reports before the last stage does, but on a channel of its
        # own: the other channels are read before the step counts as computed.
        for peer, driver in enumerate(self._drivers):
            while peer != rank and driver.poll():
                self._take(peer)
        self._results.append(self._failures.pop(report.number, report.outcome))

    @contextmanager
    def _watched(self, rank: int) -> Iterator[None]:
        """Raise WorkerError with the device of the lost worker where its channel breaks."""
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
    """Return the seconds after which a step counts as hanging."""
    seconds = plan.forecast.seconds
    if seconds is None or seconds.first_token_seconds is None:
        return _UNKNOWN_SECONDS
    return max(_MIN_SECONDS, _TIMES * seconds.first_token_seconds)

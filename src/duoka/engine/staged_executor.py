"""The executor of several processes: one for each device of a plan, which has its stages.

The driver, this process, has neither weights nor a GPU: it sends every process each step, and is
told what came of it. Steps go through the stages one behind the other. A process that ends, or that
is stopped, takes the others with it, and the executor is lost: who has it may make another one.
"""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import wait

from duoka.base.files import why
from duoka.errors import GpuLostError, MachineError
from duoka.forecast.serving import FIRST, Capacity, StepSize, WarmUp
from duoka.models.lora import LoraAdapter
from duoka.planner.plan import Plan
from duoka.report.measured import PeakBytes
from duoka.stages.route import Routes
from duoka.stages.shared_memory import SharedMemory, connect
from duoka.stages.workers import Workers, describe_end

from .executor import Result
from .stage_worker import LOST, StageReport, WorkerSettings
from .step import EngineStep

_MODULE = "duoka.engine"
# A step that takes so many times as long as reading all prompts at once does by the forecast hangs;
# and one that takes so many seconds where that is less, or nothing is forecast.
_TIMES, _LEAST_SECONDS, _UNKNOWN_SECONDS = 100.0, 60.0, 900.0
_GRACE_SECONDS = 2.0
# A process that shows no sign of life for so long is stopped, or hangs; counted are looks, not
# seconds, since this process may have been stopped as well.
_LOOK_SECONDS, _SILENT_SECONDS = 0.5, 60.0
# Before its first sign of life a process imports torch, which can take long on a slow disk.
_IMPORT_SECONDS = 300.0


class WorkerError(MachineError):
    """A process of the engine has ended, or a step in it doesn't."""


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
        self._routes = routes
        self._steps_first: WarmUp = warm_up
        self._trust_remote_code = trust_remote_code
        self._adapter = adapter
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._most_seconds = _limit(plan)
        self._failures: dict[int, Exception] = {}
        self._results: deque[Result] = deque()
        # Steps on their way, and when one was last heard of.
        self._num_open, self._heard_at = 0, 0.0
        # Signs of life as they were when all had changed, and how many looks ago that was.
        self._beats: list[int] = []
        self._num_looks, self._next_look = 0, 0.0
        self._opened = ExitStack()
        try:
            self._load(self._start_workers(len(plan.devices)))
            self._warm_up()
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise MachineError(
                f"the processes of {', '.join(plan.devices)} can't be started: {why(error)}",
                hint="see how many processes and open files are allowed: `ulimit -u -n`",
            ) from error

    def start(self) -> None:
        """See `Executor`: the processes have warmed up."""

    def _start_workers(self, number: int) -> list[list[int]]:
        """Start the processes, with all that joins them; the numbers of their sockets."""
        capacity, opened = self.capacity, self._opened
        most_tokens = capacity.tokens(max(capacity.step_tokens, capacity.sequences))
        largest = self._routes.at(most_tokens, capacity.logits(capacity.sequences))
        with ExitStack() as for_workers:
            self._memory = SharedMemory(largest, self.num_steps, number)
            opened.callback(self._memory.close)
            sockets = connect(number)
            for end in chain(*sockets):
                if end >= 0:
                    for_workers.callback(os.close, end)
            pipes = [Pipe() for _ in range(number)]
            for driver_end, worker_end in pipes:
                opened.enter_context(driver_end)
                for_workers.enter_context(worker_end)
            descriptors = [
                [worker_end.fileno(), self._memory.descriptor, *(end for end in ends if end >= 0)]
                for (_, worker_end), ends in zip(pipes, sockets, strict=True)
            ]
            self._workers = Workers(_MODULE, (), number, descriptors=descriptors)
            self._drivers = [driver_end for driver_end, _ in pipes]
            opened.callback(self._end_workers)
        return sockets

    def submit(self, step: EngineStep) -> None:
        """See `Executor`."""
        message = pickle.dumps(step)
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
            self._opened.close()
            raise

    def _wait(self) -> Result | None:
        while not self._results:
            ready = wait([*self._drivers, self._woken], _LOOK_SECONDS)
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
        """Raise where a process shows no sign of life any more, or a step takes too long."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_SECONDS
        beats = self._memory.beats()
        same = [rank for rank, beat in enumerate(self._beats) if beat == beats[rank]]
        self._num_looks += 1
        seconds = self._num_looks * _LOOK_SECONDS
        if not same:
            self._beats, self._num_looks = beats, 0
        elif seconds >= (_SILENT_SECONDS if all(beats) else _IMPORT_SECONDS):
            raise WorkerError(
                f"the process of {self._plan.devices[same[0]]} shows no sign of life for "
                f"{seconds:.0f} seconds",
                hint="has somebody stopped it (SIGSTOP), or does the machine swap?",
            )
        if self._num_open and now - self._heard_at > self._most_seconds:
            raise WorkerError(
                f"nothing has come of a step for {self._most_seconds:.0f} seconds",
                hint="see what else uses the GPUs, and whether they are well: `nvidia-smi`",
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
            driver.close()  # they end by themselves, or they are ended
        self._workers.end(_GRACE_SECONDS)

    def close(self) -> None:
        """See `Executor`."""
        self._opened.close()
        os.close(self._waker)
        os.close(self._woken)

    def _load(self, sockets: Sequence[Sequence[int]]) -> None:
        for rank, (driver, name) in enumerate(zip(self._drivers, self._plan.devices, strict=True)):
            part = WorkerSettings(
                plan=self._plan,
                device=name,
                trust_remote_code=self._trust_remote_code,
                adapter=self._adapter,
                capacity=self.capacity,
                routes=self._routes,
                memory=self._memory,
                rank=rank,
                sockets=tuple(sockets[rank]),
            )
            with self._watched(rank):
                driver.send_bytes(pickle.dumps(part))
        for rank, driver in enumerate(self._drivers):
            with self._watched(rank):
                while not driver.poll(_LOOK_SECONDS):
                    self._look()
                error: Exception | None = driver.recv()
            if error is not None:
                raise error

    def _warm_up(self) -> None:
        """Make the pages, and see that there is memory for other sizes of a step.

        On virtual GPUs and on CUDA all sizes are gone through until none takes more memory: none
        ever will then (`forecast.serving`).
        """
        self._try_out([FIRST])
        if self._steps_first == "first":
            return
        reserved, now = -1, self._reserved_bytes()
        if self._steps_first == "largest" or not now:
            self._try_out(self.capacity.largest_steps())
            return
        while reserved < now:
            self._try_out(self.capacity.steps())
            reserved, now = now, self._reserved_bytes()

    def _try_out(self, sizes: Sequence[StepSize]) -> None:
        for number, size in enumerate(sizes):
            self.submit(EngineStep(number, [], size))
            while (result := self._wait()) is None:
                pass  # somebody asks already
            if isinstance(result.outcomes, Exception):
                raise MachineError(
                    f"a step of {size.tokens} tokens fails: {str(result.outcomes)[:300]}",
                    hint="something else uses the memory that the plan counted on; or plan for "
                    "fewer requests (--sequences), or for smaller steps (--prefill-chunk)",
                ) from result.outcomes

    def _reserved_bytes(self) -> int:
        return sum(notes.reserved_bytes for notes in self._memory.notes())

    def _take(self, rank: int) -> None:
        """Take what a process tells."""
        with self._watched(rank):
            report: StageReport = self._drivers[rank].recv()
        self._heard_at = time.monotonic()
        if isinstance(report.outcome, GpuLostError):
            raise report.outcome
        if isinstance(report.outcome, Exception):
            self._failures.setdefault(report.number, report.outcome)
        if not report.is_last:
            return
        # A failure before was told before what came of it.
        for other, driver in enumerate(self._drivers):
            while other != rank and driver.poll():
                self._take(other)
        outcome = self._failures.pop(report.number, report.outcome)
        self._results.append(Result(report.number, outcome))

    @contextmanager
    def _watched(self, rank: int) -> Iterator[None]:
        """Tell which process has ended, where one has."""
        try:
            yield
        except (EOFError, OSError) as error:
            for driver in self._drivers:  # the others end, too
                driver.close()
            codes = self._workers.codes(_GRACE_SECONDS)
            # Those that ended because of another one say so.
            first = next((at for at, code in codes.items() if code not in (0, LOST)), rank)
            end = describe_end(codes.get(first))
            raise WorkerError(
                f"the process of {self._plan.devices[first]} has ended: {end}",
                hint="what it wrote to the standard error stream may say why; the kernel ends "
                "processes where the host's memory runs out: `dmesg`",
            ) from error


def _limit(plan: Plan) -> float:
    """After how many seconds a step hangs."""
    seconds = plan.forecast.seconds
    if seconds is None or seconds.first_token_seconds is None:
        return _UNKNOWN_SECONDS
    return max(_LEAST_SECONDS, _TIMES * seconds.first_token_seconds)

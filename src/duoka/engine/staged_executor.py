"""The executor of several processes: one for each device of a plan, which has its stages.

The driver, this process, has neither weights nor a GPU: it sends every process each step, and is
told what came of it. Steps go through the stages one behind the other. A process that ends takes
the others with it; they can be started again.
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
from duoka.errors import MachineError
from duoka.forecast.serving import FIRST, Capacity, StepSize
from duoka.models.lora import Adapter
from duoka.planner.plan import Plan
from duoka.report.measured import PeakBytes
from duoka.stages.route import Route, Routes
from duoka.stages.shared_memory import SharedMemory, connect
from duoka.stages.workers import Workers

from .executor import Lost, Result
from .paged_model import WarmUp
from .stage_worker import LOST, Part, Report
from .step import Step

_MODULE = "duoka.engine"
# A step that takes so many times as long as reading all prompts at once does by the forecast hangs;
# and one that takes so many seconds where that is less, or nothing is forecast.
_TIMES, _LEAST_SECONDS, _UNKNOWN_SECONDS = 100.0, 60.0, 900.0
_GRACE_SECONDS = 2.0
# So many losses within so long, and it isn't tried again.
_MOST_LOSSES = 3
_LOSSES_SECONDS = 600.0


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
        Which steps are computed before anybody asks, whenever the processes are started.
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
        adapter: Adapter | None = None,
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
        # Whether the processes are there, and when they have been lost.
        self._is_started = False
        self._losses: deque[float] = deque(maxlen=_MOST_LOSSES)
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        """Start the processes, and wait until each has its part."""
        names = self._plan.devices
        capacity = self.capacity
        most_tokens = capacity.tokens(max(capacity.step_tokens, capacity.sequences))
        largest = self._routes.at(most_tokens, capacity.logits(capacity.sequences))
        try:
            sockets = self._start_workers(largest, len(names))
        except OSError as error:
            raise MachineError(
                f"the processes of {', '.join(names)} can't be started: {why(error)}",
                hint="see how many processes and open files are allowed: `ulimit -u -n`",
            ) from error
        self._failures: dict[int, Exception] = {}
        self._results: deque[Result] = deque()
        self._is_started = True
        try:
            self._load(sockets)
            self._warm_up()
        except BaseException:
            self._stop()
            raise

    def _start_workers(self, largest: Route, number: int) -> list[list[int]]:
        """Start the processes, with all that joins them; the numbers of their sockets."""
        with ExitStack() as opened, ExitStack() as for_workers:
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
            opened.pop_all()  # all is there, and stays
        return sockets

    def submit(self, step: Step) -> None:
        """See `Executor`.

        Raises
        ------
        DuokaError
            If processes that were lost can't be started again.
        """
        if not self._is_started:
            self._start()
        message = pickle.dumps(step)
        with suppress(OSError):  # a process is gone, which `wait` tells
            for driver in self._drivers:
                driver.send_bytes(message)

    def wait(self) -> Result | Lost | None:
        """See `Executor`.

        Raises
        ------
        WorkerError
            If processes have been lost too often to start them once more.
        """
        try:
            return self._wait()
        except WorkerError as error:
            self._stop()
            self._losses.append(time.monotonic())
            if self._is_lost_often:
                raise
            return Lost(error)

    def _wait(self) -> Result | None:
        while not self._results:
            ready = wait([*self._drivers, self._woken], self._most_seconds)
            if not ready:
                raise WorkerError(
                    f"nothing has come of a step for {self._most_seconds:.0f} seconds",
                    hint="see what else uses the GPUs, and whether they are well: `nvidia-smi`",
                )
            for rank, driver in enumerate(self._drivers):
                if driver in ready:
                    self._take(rank)
            if self._woken in ready:
                os.read(self._woken, 2**16)
                if not self._results:
                    return None
        return self._results.popleft()

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

    def _stop(self) -> None:
        """End the processes."""
        if not self._is_started:
            return
        self._is_started = False
        for driver in self._drivers:
            with suppress(OSError):
                driver.send(None)
            driver.close()  # they end by themselves, or they are ended
        self._workers.end(_GRACE_SECONDS)
        self._memory.close()

    def close(self) -> None:
        """See `Executor`."""
        self._stop()
        os.close(self._waker)
        os.close(self._woken)

    @property
    def _is_lost_often(self) -> bool:
        is_full = len(self._losses) == _MOST_LOSSES
        return is_full and self._losses[-1] - self._losses[0] < _LOSSES_SECONDS

    def _load(self, sockets: Sequence[Sequence[int]]) -> None:
        for rank, (driver, name) in enumerate(zip(self._drivers, self._plan.devices, strict=True)):
            part = Part(
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
            self.submit(Step(number, [], size))
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
            report: Report = self._drivers[rank].recv()
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
            codes = self._workers.codes(_GRACE_SECONDS)
            # Those that ended because of another one say so.
            first = next((at for at, code in codes.items() if code not in (0, LOST)), rank)
            raise WorkerError(
                f"the process of {self._plan.devices[first]} has ended: {_how(codes.get(first))}",
                hint="what it wrote to the standard error stream may say why; the kernel ends "
                "processes where the host's memory runs out: `dmesg`",
            ) from error


def _limit(plan: Plan) -> float:
    """After how many seconds a step hangs."""
    seconds = plan.forecast.seconds
    if seconds is None or seconds.first_token_seconds is None:
        return _UNKNOWN_SECONDS
    return max(_LEAST_SECONDS, _TIMES * seconds.first_token_seconds)


def _how(code: int | None) -> str:
    if code is None:
        return "its connection was lost"
    return f"signal {-code}" if code < 0 else f"exit code {code}"

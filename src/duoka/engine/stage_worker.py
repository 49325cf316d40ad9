"""The worker process of one device, which computes its stages: ``python -m duoka.engine``."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from duoka.base.garbage import freeze_objects
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import GpuLostError
from duoka.forecast.serving import Capacity, StepSize
from duoka.hardware.fleet import Fleet
from duoka.models.lora import LoraAdapter
from duoka.planner.plan import Plan
from duoka.runtime import devices
from duoka.runtime.call.chunk import Chunk
from duoka.runtime.call.paged_model import PagedModel
from duoka.runtime.call.paged_step import PagedStep
from duoka.runtime.draw import draw_in_every_way
from duoka.runtime.load import load_weights
from duoka.runtime.load.adapter import apply_adapters, build_to_serve
from duoka.runtime.lost_gpu import find_lost_gpu
from duoka.runtime.out_of_memory import explain
from duoka.runtime.publisher import BusyShares, Publisher
from duoka.stages.channels import Channel
from duoka.stages.interceptor import BlockInterceptor
from duoka.stages.micro_batch import StageMicroBatch
from duoka.stages.route import Routes
from duoka.stages.shared_memory import Notes, SharedMemory, SharedMemoryChannel
from duoka.workers.portable import make_portable
from duoka.workers.worker import run_with_channel

from .executor import outcomes_of, sample_rows
from .request import Outcome
from .stage_graphs import KeptTensors, StageGraphs

_BEAT_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class EngineStep:
    """A step: chunks of different sequences to compute at once; `number` identifies the step.

    A trial step has a `size` and no chunks: it computes padding, to allocate the needed memory, or
    if `is_graph` a decode step, of which each stage then records a CUDA graph.
    """

    number: int
    chunks: Sequence[Chunk]
    size: StepSize | None = None
    is_graph: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The common settings of all worker processes.

    `memory` is the shared memory for activations sent between stages; `adapter` is merged into the
    weights.
    """

    plan: Plan
    trust_remote_code: bool
    adapter: LoraAdapter | None
    capacity: Capacity
    routes: Routes
    memory: SharedMemory


class StageReport(NamedTuple):
    """The error of a step in one stage, or the step's outcomes from the last stage."""

    number: int
    outcome: list[Outcome] | Exception
    is_last: bool


class _StageWorker:
    """The model's stages on the device of a rank; `sockets` connect the other workers, by rank."""

    def __init__(self, settings: WorkerSettings, rank: int, sockets: Sequence[int]) -> None:
        plan, names, device = settings.plan, settings.routes.devices, settings.plan.devices[rank]
        devices.materialise(Fleet(devices=(plan.fleet.device(device),)))
        self._device = torch.device(device)
        devices.make_current(self._device)
        checkpoint = Checkpoint.open(plan.source, trust_remote_code=settings.trust_remote_code)
        plan.refuse_other(checkpoint.fingerprint, plan.source)  # the files may have changed
        model = build_to_serve(checkpoint, plan.workload)
        load_weights(model, checkpoint, plan.placement, only=self._device)
        apply_adapters(model, checkpoint, plan.workload, settings.adapter)
        shares = BusyShares(lambda: {device: self._busy_seconds})
        self.publisher = Publisher(plan, model, [device], busy_shares=shares)
        self._interceptor = BlockInterceptor(model, plan.placement)
        self._paged = PagedModel(model, settings.capacity, self._device, is_known=True)
        self._graphs = StageGraphs(self._paged, self._interceptor, self._device)
        self._routes = settings.routes
        ranks = [plan.devices.index(name) for name in names]
        self._channel = SharedMemoryChannel(settings.memory, sockets, ranks, self._device)
        self._stages = [stage for stage, name in enumerate(names) if name == device]
        self._memory, self._rank = settings.memory, rank
        self._busy_seconds = self._idle_since = 0.0
        # Several stages may be on this device (a head tied to the embedding). With stages 0 and 2
        # here, step n waits as (n, 2) after stage 0. The first stage of a new step comes before
        # waiting stages, so that no other device waits for this one; otherwise the oldest goes
        # next.
        self._waiting_stages: deque[tuple[EngineStep, PagedStep, int]] = deque()

    def serve(self, driver: Connection) -> None:
        """Compute steps until the driver sends None."""
        first_stage, *later_stages = self._stages
        self._channel.report_errors(partial(self._report_loss, driver))
        while True:
            while self._waiting_stages and not driver.poll():
                self._compute(driver, *self._waiting_stages.popleft())
            step: EngineStep | None = driver.recv()
            if step is None:
                self._write_peaks()
                return
            paged = self._paged.step(step.chunks, step.size, is_decoding=step.is_graph)
            self._waiting_stages.extend((step, paged, stage) for stage in later_stages)
            self._compute(driver, step, paged, first_stage)

    def _write_peaks(self) -> None:
        """Write busy seconds and peak memory to shared memory."""
        peaks = devices.peak_bytes(self._device)
        if peaks is not None:
            notes = Notes(self._busy_seconds, peaks.allocated_bytes, peaks.reserved_bytes)
            self._memory.note(self._rank, notes)

    def _report_trial(self, driver: Connection) -> None:
        """Tell the driver what the trial steps so far have found."""
        self._write_peaks()
        for fallback in self._paged.fallbacks:
            driver.send(fallback)

    def _report_loss(self, driver: Connection, error: Exception) -> None:
        """Report a GPU that was lost while its results were copied; see `_compute` for others."""
        if lost := find_lost_gpu(error, str(self._device)):
            driver.send(StageReport(0, lost, is_last=False))

    def _count_busy(self, begin: float) -> None:
        """Count the time since `begin`, or since the previous step's end, as busy; note it."""
        now = time.perf_counter()
        self._busy_seconds += max(0.0, now - max(begin, self._idle_since))
        self._idle_since = now
        self._memory.note_busy(self._rank, self._busy_seconds)

    @torch.no_grad()
    def _compute(self, driver: Connection, step: EngineStep, paged: PagedStep, stage: int) -> None:
        """Compute a stage of a step; report an error, or the outcomes if it is the last stage."""
        # A failed step must not block other steps in flight: no stage may wait for tensors that
        # never arrive. So a failing stage first reports the error to the driver, and then still
        # does the step's transfers (`abandon`): it receives its inputs and sends zeros. Later
        # stages compute with the zeros, and the driver drops their outcomes.
        route = self._routes.at(paged.num_tokens, len(paged.last_rows))

        def make(channel: Channel) -> StageMicroBatch:
            return StageMicroBatch(route, stage, step.number, channel, self._device, learns=False)

        tensors = KeptTensors(self._device, self._channel) if step.is_graph else None
        micro_batch = make(tensors or self._channel)
        begin, waited = time.perf_counter(), self._channel.waited_seconds
        is_last = stage == len(self._routes.devices) - 1
        failure = None
        try:
            logits = self._graphs.forward(stage, paged, micro_batch)
            if tensors is not None:
                self._graphs.record(stage, (paged, tensors, logits), make)
            if logits is not None:
                outcomes = _find_outcomes(step, logits)
                driver.send(StageReport(step.number, outcomes, is_last))
        except (EOFError, OSError):  # the connection to another process is lost
            raise
        except Exception as error:  # any error of the model's code fails only this step
            lost = find_lost_gpu(error, str(self._device))
            failure = lost or make_portable(explain(error, self.publisher))
            failure.__traceback__ = None  # its frames hold tensors on the device
        begin += self._channel.waited_seconds - waited
        if step.size is not None:
            self._report_trial(driver)
        if failure is not None:  # must reach the driver before later stages' reports
            driver.send(StageReport(step.number, failure, is_last))
            if isinstance(failure, GpuLostError):
                raise failure
            if isinstance(failure, torch.OutOfMemoryError):
                devices.give_back()
            micro_batch.abandon()
        self._channel.after_sends(partial(self._count_busy, begin))


def _find_outcomes(step: EngineStep, logits: torch.Tensor) -> list[Outcome]:
    """Sample the tokens of a step; of a trial step, in every way."""
    if step.size is not None:
        draw_in_every_way(logits)
    return outcomes_of(step.chunks, sample_rows(step.chunks, logits))


def main() -> None:
    """Run the worker process of a rank."""
    run_with_channel(_serve)


def _serve(driver: Connection) -> None:
    """Load the rank's stages, report success or the error to the driver, then compute steps."""
    settings, rank, sockets = driver.recv()
    threading.Thread(target=_run_heartbeat, args=(settings.memory, rank), daemon=True).start()
    try:
        worker = _StageWorker(settings, rank, sockets)
    except Exception as error:  # any error of the model's code, which the driver raises
        lost = find_lost_gpu(error, settings.plan.devices[rank])
        driver.send((None, lost or make_portable(error)))
        return
    driver.send((None, None))
    freeze_objects()
    with closing(worker.publisher.start()):
        worker.serve(driver)


def _run_heartbeat(memory: SharedMemory, rank: int) -> None:
    """Increment the heartbeat of this process in shared memory, four times a second."""
    for number in count(1):
        memory.beat(rank, number)
        time.sleep(_BEAT_SECONDS)

"""A process that has the stages of a device: ``python -m duoka.engine``."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from duoka.base.garbage import freeze_objects
from duoka.base.portable import portable
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import GpuLostError
from duoka.forecast.serving import Capacity
from duoka.hardware.fleet import Fleet
from duoka.models.from_checkpoint import build_model
from duoka.models.lora import LoraAdapter, merge_adapter
from duoka.planner.plan import Plan
from duoka.runtime import devices
from duoka.runtime.call.paged_model import PagedModel, PagedStep
from duoka.runtime.draw import draw_in_every_way
from duoka.runtime.load import load_weights
from duoka.runtime.lost_gpu import find_lost_gpu
from duoka.runtime.out_of_memory import explain
from duoka.runtime.publisher import BusyShares, Publisher
from duoka.stages.interceptor import BlockInterceptor
from duoka.stages.micro_batch import StageMicroBatch
from duoka.stages.route import Routes
from duoka.stages.shared_memory import Notes, SharedMemory, SharedMemoryChannel
from duoka.stages.workers import end_with_parent

from .executor import outcomes_of
from .step import EngineStep, Outcome

_BEAT_SECONDS = 0.25
LOST, DEFECT = 75, 70
"""The exit codes of a process that ends because another one did, and of one with a defect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What a process is to have: the stages of a plan that are on a device.

    `memory` and `sockets` are how tensors reach the others, and `rank` is the number that it has
    among them (`stages.shared_memory`); `adapter`, in native form, is added to the weights.
    """

    plan: Plan
    device: str
    trust_remote_code: bool
    adapter: LoraAdapter | None
    capacity: Capacity
    routes: Routes
    memory: SharedMemory
    rank: int
    sockets: tuple[int, ...]


class StageReport(NamedTuple):
    """What a process tells of a step: that it has failed, or what came of it in the last stage."""

    number: int
    outcome: list[Outcome] | Exception
    is_last: bool


class _StageWorker:
    """The stages of one process."""

    def __init__(self, part: WorkerSettings) -> None:
        plan, names = part.plan, part.routes.devices
        devices.materialise(Fleet(devices=(plan.fleet.device(part.device),)))
        self._device = torch.device(part.device)
        devices.make_current(self._device)
        checkpoint = Checkpoint.open(plan.source, trust_remote_code=part.trust_remote_code)
        plan.refuse_other(checkpoint.fingerprint, plan.source)  # it may be started again much later
        model = build_model(checkpoint, plan.workload)
        load_weights(model, checkpoint, plan.placement, only=self._device)
        if part.adapter is not None:
            merge_adapter(model, part.adapter)
        shares = BusyShares(lambda: {part.device: self._busy_seconds})
        self.publisher = Publisher(plan, model, [part.device], busy_shares=shares)
        self._interceptor = BlockInterceptor(model, plan.placement)
        self._paged = PagedModel(model, part.capacity)
        self._routes = part.routes
        ranks = [plan.devices.index(name) for name in names]
        self._channel = SharedMemoryChannel(part.memory, part.sockets, ranks, self._device)
        self._stages = [stage for stage, name in enumerate(names) if name == part.device]
        self._memory, self._rank = part.memory, part.rank
        self._busy_seconds = 0.0
        # Visits of steps to this process's later stages.
        self._later: deque[tuple[EngineStep, PagedStep, int]] = deque()

    def serve(self, driver: Connection) -> None:
        """Compute steps until there are no more."""
        first, *later_stages = self._stages
        while True:
            while self._later and not driver.poll():
                self._visit(driver, *self._later.popleft())
            step: EngineStep | None = driver.recv()
            if step is None:
                self._note_peaks()
                return
            paged = self._paged.step(step.chunks, step.size)
            self._later.extend((step, paged, stage) for stage in later_stages)
            self._visit(driver, step, paged, first)

    def _note_peaks(self) -> None:
        peaks = devices.peak_bytes(self._device)
        if peaks is not None:
            notes = Notes(self._busy_seconds, peaks.allocated_bytes, peaks.reserved_bytes)
            self._memory.note(self._rank, notes)

    @torch.no_grad()
    def _visit(self, driver: Connection, step: EngineStep, paged: PagedStep, stage: int) -> None:
        """Compute what a stage has to do for a step, and tell of it."""
        route = self._routes.at(paged.num_tokens, len(paged.last_rows))
        part = StageMicroBatch(route, stage, step.number, self._channel, self._device, learns=False)
        begin, waited = time.perf_counter(), self._channel.waited_seconds
        is_last = stage == len(self._routes.devices) - 1
        failure = None
        try:
            logits = part.forward(self._interceptor, self._paged.call(paged, self._device))
            if logits is not None:
                if step.size is not None:
                    draw_in_every_way(logits)
                driver.send(StageReport(step.number, outcomes_of(step, logits), is_last))
        except (EOFError, OSError):  # another process is gone
            raise
        except Exception as error:
            lost = find_lost_gpu(error, str(self._device))
            failure = lost or portable(explain(error, self.publisher))
            failure.__traceback__ = None  # which holds what was on the device
        seconds = time.perf_counter() - begin - (self._channel.waited_seconds - waited)
        self._busy_seconds += seconds
        if step.size is None:
            self._memory.note(self._rank, Notes(self._busy_seconds))
        else:
            self._note_peaks()
        if failure is not None:  # which the driver knows before anything more comes of the step
            driver.send(StageReport(step.number, failure, is_last))
            if isinstance(failure, GpuLostError):
                raise failure
            if isinstance(failure, torch.OutOfMemoryError):
                devices.give_back()
            part.abandon()


def main() -> None:
    """The entry of a process: the socket of its driver is its last argument."""
    end_with_parent()
    driver: Connection = Connection(int(sys.argv[-1]))
    code = 0
    try:
        _serve(driver)
    except (EOFError, OSError):  # the driver or another process is gone
        code = LOST
    except GpuLostError as error:  # which the driver has been told
        code = error.exit_code
    except Exception:
        traceback.print_exc()
        code = DEFECT
    sys.stderr.flush()
    os._exit(code)  # whatever threads there may be


def _serve(driver: Connection) -> None:
    part: WorkerSettings = driver.recv()
    threading.Thread(target=_beat, args=(part.memory, part.rank), daemon=True).start()
    try:
        worker = _StageWorker(part)
    except Exception as error:
        driver.send(find_lost_gpu(error, part.device) or portable(error))
        return
    freeze_objects()
    driver.send(None)
    with closing(worker.publisher.start()):
        worker.serve(driver)


def _beat(memory: SharedMemory, rank: int) -> None:
    """Show that this process is alive."""
    for number in count(1):
        memory.beat(rank, number)
        time.sleep(_BEAT_SECONDS)

"""Executors: what computes steps, and how many of them at the same time."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoka.errors import ModelError
from duoka.forecast.serving import Capacity, WarmUp
from duoka.forecast.workload import PAGED_CACHES, Workload
from duoka.planner.plan import Plan
from duoka.report.measured import PeakBytes
from duoka.runtime import devices
from duoka.runtime.lost_gpu import find_lost_gpu
from duoka.runtime.out_of_memory import explain
from duoka.runtime.paged_steps import reads_pages
from duoka.runtime.publisher import BusyShares, Publisher

from .cached_model import CachedModel
from .paged_model import PagedModel
from .request import SamplingParams
from .sampler import SamplingRow, sample
from .step import Chunk, EngineStep, Outcome

_PLAIN = Workload(prefill_chunk_tokens=None)
_IN_PAGES = ("dynamic", *PAGED_CACHES)
_NOBODYS_ROW = SamplingRow(params=SamplingParams(), seed=0, place=0)


class Result(NamedTuple):
    """What a step came to: an outcome for each chunk, or why it failed, which is all chunks'."""

    number: int
    outcomes: Sequence[Outcome] | Exception


class Executor(Protocol):
    """Computes steps, in the order in which they are submitted."""

    capacity: Capacity
    is_paged: bool
    num_steps: int
    """Steps that are worth submitting before the first one has ended."""

    def start(self) -> None:
        """Warm up, in the thread that calls `wait`; capacity and `is_paged` are final then."""

    def submit(self, step: EngineStep) -> None:
        """Let a step be computed."""

    def wait(self) -> Result | None:
        """Wait for the next step to end; None where `wake` was called.

        Raises
        ------
        MachineError
            If a GPU or a process is lost, and with it all steps; no step is computed any more.
        """

    def wake(self) -> None:
        """Let who waits look around. From any thread."""

    def forget(self, sequence: int) -> None:
        """A sequence has ended."""

    def busy_seconds(self) -> dict[str, float]:
        """For how long each device has computed, as far as that is known."""

    def peaks(self) -> list[PeakBytes]:
        """The peaks of the devices' memory, known when the executor is closed."""

    def close(self) -> None:
        """End; give back all that was taken."""


class InlineExecutor:
    """Computes steps in this process, one after another, when they are waited for.

    Parameters
    ----------
    model : PreTrainedModel
        On one device, or dispatched over several.
    capacity : Capacity
        What memory is there for. A model that doesn't read from pages has a page for each sequence,
        and reads each prompt at once.
    workload : Workload
        What was planned.
    warm_up : {"first", "largest", "every"}
        Which steps are computed at once. The forecast of a paged cache has every size.
    plan : Plan, optional
        Which the model was loaded for just now: its memory is published beside the forecast.
    """

    num_steps = 1

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: Capacity,
        workload: Workload = _PLAIN,
        *,
        warm_up: WarmUp = "first",
        plan: Plan | None = None,
    ) -> None:
        self._opened = ExitStack()
        self._publisher = None
        if plan is not None:
            shares = BusyShares(self.busy_seconds)
            self._publisher = Publisher(plan, model, plan.devices, busy_shares=shares)
            self._opened.callback(self._publisher.close)
        self._open = partial(_open, model, capacity, workload, warm_up)
        self._devices = {str(parameter.device) for parameter in model.parameters()}
        self.capacity = capacity
        self._steps: deque[EngineStep] = deque()
        self._woken = threading.Event()
        self._busy_seconds = 0.0

    def start(self) -> None:
        """See `Executor`: in each thread that computes cuBLAS takes a workspace of its own."""
        self._model = self._open()
        self._opened.callback(self._model.close)
        self.is_paged = isinstance(self._model, PagedModel)
        capacity = self.capacity
        self.capacity = replace(capacity, whole_prompts=False)
        if isinstance(self._model, CachedModel):
            sequences = 1 if self._model.keeps_state_in_modules else capacity.sequences
            self.capacity = replace(
                capacity,
                sequences=sequences,
                pages=sequences,
                page_tokens=capacity.context_tokens,
                step_tokens=sequences * capacity.context_tokens,
                whole_prompts=True,
            )
        if self._publisher is not None:
            self._publisher.start()

    def submit(self, step: EngineStep) -> None:
        """See `Executor`."""
        self._steps.append(step)

    def wait(self) -> Result | None:
        """See `Executor`."""
        if not self._steps:
            self._woken.wait()
            self._woken.clear()
            return None
        step = self._steps.popleft()
        begin = time.perf_counter()
        try:
            return self._result(step)
        finally:
            self._busy_seconds += time.perf_counter() - begin

    def _result(self, step: EngineStep) -> Result:
        try:
            if self.is_paged:
                return Result(step.number, outcomes_of(step, self.run(step.chunks)))
        except Exception as error:
            return Result(step.number, self._explained(error))
        return Result(step.number, [self._alone(chunk) for chunk in step.chunks])

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute chunks; the logits of those that have a row, [rows, vocabulary]."""
        return self._model.run(chunks)

    def wake(self) -> None:
        """See `Executor`."""
        self._woken.set()

    def busy_seconds(self) -> dict[str, float]:
        """See `Executor`: of several devices only one works at a time, and nobody asks which."""
        if len(self._devices) > 1:
            return {}
        return dict.fromkeys(self._devices, self._busy_seconds)

    def peaks(self) -> list[PeakBytes]:
        """See `Executor`."""
        peaks = map(devices.peak_bytes, sorted(self._devices))
        return [device_peaks for device_peaks in peaks if device_peaks is not None]

    def forget(self, sequence: int) -> None:
        """See `Executor`."""
        if isinstance(self._model, CachedModel):
            self._model.forget(sequence)

    def close(self) -> None:
        """See `Executor`."""
        self._opened.close()

    def _alone(self, chunk: Chunk) -> Outcome:
        """What a chunk comes to that isn't computed with others, nor again."""
        try:
            (outcome,) = outcomes_of(EngineStep(0, [chunk]), self.run([chunk]))
        except Exception as error:
            return self._explained(error)
        return outcome

    def _explained(self, error: Exception) -> Exception:
        """Why a step failed; what it took is given back. A lost GPU ends all work."""
        lost = find_lost_gpu(error)
        if lost is not None:
            raise lost from error
        if isinstance(error, torch.OutOfMemoryError):
            explain(error, self._publisher)
            error.__traceback__ = None  # which holds what was on the devices
            devices.give_back()
        return error


def outcomes_of(step: EngineStep, logits: Tensor) -> list[Outcome]:
    """Choose the next tokens of a step's sequences."""
    padding = [_NOBODYS_ROW] * (len(logits) - len(step.rows))
    choices = iter(sample(logits, step.rows + padding))
    return [None if chunk.row is None else next(choices) for chunk in step.chunks]


def _open(
    model: PreTrainedModel, capacity: Capacity, workload: Workload, warm_up: WarmUp
) -> PagedModel | CachedModel:
    if workload.cache in _IN_PAGES and not workload.images and reads_pages(model):
        paged = PagedModel(model, capacity)
        with suppress(ModelError):  # its code wants more of attention than it is known to
            paged.try_out(warm_up)
            return paged
    return CachedModel(model, workload)

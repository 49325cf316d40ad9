"""Executors compute the steps of an engine, in this process or in several."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoka.errors import ModelError
from duoka.forecast.serving import Capacity, WarmUp
from duoka.forecast.workload import PAGED_CACHES, Workload
from duoka.planner.plan import Plan
from duoka.report.measured import PeakBytes
from duoka.runtime import devices
from duoka.runtime.call.cached_model import CachedModel
from duoka.runtime.call.chunk import Chunk
from duoka.runtime.call.paged_model import PagedModel, reading_pages, reads_pages
from duoka.runtime.lost_gpu import find_lost_gpu
from duoka.runtime.out_of_memory import explain
from duoka.runtime.publisher import BusyShares, Publisher

from .request import Outcome, SamplingParams
from .sampler import SamplingRow, sample

_PLAIN = Workload(prefill_chunk_tokens=None)
_IN_PAGES = ("dynamic", *PAGED_CACHES)
_PADDING_ROW = SamplingRow(params=SamplingParams(), seed=0, place=0)


Result = Sequence[Outcome] | Exception
"""The result of a step: an outcome for each chunk, or the error of all chunks."""


class Executor(Protocol):
    """Computes steps: chunks of different sequences at once. Results come in the order of steps."""

    capacity: Capacity
    is_paged: bool
    num_steps: int
    """Steps to have in flight: more of them make nothing faster."""

    def start(self) -> None:
        """Warm up, in the thread that calls `wait`; capacity and `is_paged` are final then."""

    def submit(self, chunks: Sequence[Chunk]) -> None:
        """Queue a step."""

    def wait(self) -> Result | None:
        """Wait for the next step to end; return None where `wake` was called.

        Raises
        ------
        MachineError
            If a GPU or a process is lost, and with it all steps; no further step is computed.
        """

    def wake(self) -> None:
        """Let `wait` return. From any thread."""

    def forget(self, sequence: int) -> None:
        """Free the state of an ended sequence."""

    def busy_seconds(self) -> dict[str, float]:
        """Return the computing seconds of each device, where they are known."""

    def peaks(self) -> list[PeakBytes]:
        """Return the peaks of the devices' memory, known when the executor is closed."""

    def close(self) -> None:
        """End, and free all resources."""


class InlineExecutor:
    """Computes steps in this process, one after another, in `wait`.

    Parameters
    ----------
    model : PreTrainedModel
        On one device, or dispatched over several.
    capacity : Capacity
        A model that doesn't read from pages gets a page for each sequence, and reads each prompt in
        a single step.
    workload : Workload
        That of the plan.
    warm_up : {"first", "largest", "every"}
        The steps to run in `start`. The forecast of a paged cache has every size.
    plan : Plan, optional
        The plan of the model, if it has just been loaded: its memory is published beside the
        forecast.
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
        self._steps: deque[Sequence[Chunk]] = deque()
        self._woken = threading.Event()
        self._busy_seconds = 0.0

    def start(self) -> None:
        """See `Executor`: cuBLAS allocates a workspace for each computing thread."""
        self._model = self._open()
        self._opened.callback(self._model.close)
        self.is_paged = isinstance(self._model, PagedModel)
        capacity = self.capacity
        if isinstance(self._model, PagedModel):
            self.capacity = replace(capacity, whole_prompts=False)
        else:
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

    def submit(self, chunks: Sequence[Chunk]) -> None:
        """See `Executor`."""
        self._steps.append(chunks)

    def wait(self) -> Result | None:
        """See `Executor`."""
        if not self._steps:
            self._woken.wait()
            self._woken.clear()
            return None
        chunks = self._steps.popleft()
        begin = time.perf_counter()
        try:
            if self.is_paged:
                return self._compute(chunks)
            # Each chunk by itself: none is ever computed again.
            results = [self._compute([chunk]) for chunk in chunks]
            return [part if isinstance(part, Exception) else part[0] for part in results]
        finally:
            self._busy_seconds += time.perf_counter() - begin

    def _compute(self, chunks: Sequence[Chunk]) -> list[Outcome] | Exception:
        """Compute chunks; a failure is explained and its memory freed, a lost GPU ends all work."""
        try:
            return outcomes_of(chunks, self.run(chunks))
        except Exception as error:  # whatever the model's code raises fails these chunks alone
            if lost := find_lost_gpu(error):
                raise lost from error
            if isinstance(error, torch.OutOfMemoryError):
                explain(error, self._publisher)
                error.__traceback__ = None  # it holds tensors on the devices
                devices.give_back()
            return error

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute chunks; return the logits of those with a row, [rows, vocabulary]."""
        return self._model.run(chunks)

    def wake(self) -> None:
        """See `Executor`."""
        self._woken.set()

    def busy_seconds(self) -> dict[str, float]:
        """See `Executor`: with several devices, the share of each isn't known."""
        if len(self._devices) > 1:
            return {}
        return dict.fromkeys(self._devices, self._busy_seconds)

    def peaks(self) -> list[PeakBytes]:
        """See `Executor`."""
        return list(filter(None, map(devices.peak_bytes, sorted(self._devices))))

    def forget(self, sequence: int) -> None:
        """See `Executor`."""
        if isinstance(self._model, CachedModel):
            self._model.forget(sequence)

    def close(self) -> None:
        """See `Executor`; the model's memory is free as soon as nobody else has the model."""
        self._opened.close()
        # These form cycles with the executor, which only garbage collection would end.
        self._publisher = None
        for name in ("_open", "_model"):
            vars(self).pop(name, None)


def outcomes_of(chunks: Sequence[Chunk], logits: Tensor) -> list[Outcome]:
    """Sample the next tokens of the sequences of chunks."""
    rows = [chunk.row for chunk in chunks if chunk.row is not None]
    choices = iter(sample(logits, rows + [_PADDING_ROW] * (len(logits) - len(rows))))
    return [None if chunk.row is None else next(choices) for chunk in chunks]


def _open(
    model: PreTrainedModel, capacity: Capacity, workload: Workload, warm_up: WarmUp
) -> PagedModel | CachedModel:
    if workload.cache in _IN_PAGES and not workload.images and reads_pages(model):
        # A ModelError: the model's code needs more than causal attention.
        with suppress(ModelError), ExitStack() as undo, reading_pages(model):
            paged = PagedModel(model, capacity)
            undo.callback(paged.close)
            paged.warm_up(warm_up)
            undo.pop_all()
            return paged
    return CachedModel(model, workload)

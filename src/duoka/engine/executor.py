"""Executors compute the steps of an engine, in this process or in several."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duoka.errors import ModelError
from duoka.forecast.serving import Capacity, WarmUp
from duoka.forecast.workload import PAGED_CACHES, Workload
from duoka.models.quantization import computing_devices
from duoka.models.quantization.expert_cache import COUNTS
from duoka.planner.plan import Plan
from duoka.report.measured import Fallback, PeakBytes
from duoka.runtime import devices
from duoka.runtime.call.cached_model import CachedModel
from duoka.runtime.call.chunk import Chunk
from duoka.runtime.call.paged_model import PagedModel, reading_pages, reads_pages
from duoka.runtime.lost_gpu import find_lost_gpu
from duoka.runtime.out_of_memory import explain
from duoka.runtime.publisher import BusyShares, Publisher

from .request import Outcome, SamplingParams
from .sampler import SampledTokens, SamplingRow, sample

T = TypeVar("T")
_PLAIN = Workload(prefill_chunk_tokens=None)
_PAGEABLE_CACHES = ("dynamic", *PAGED_CACHES)
_StepInFlight = tuple[float, list[Sequence[Chunk]], list[SampledTokens | Exception]]
_PADDING_ROW = SamplingRow(params=SamplingParams(), seed=0, place=0)


Result = Sequence[Outcome] | Exception
"""The result of a step: an outcome for each chunk, or one error if the whole step failed."""


class Executor(Protocol):
    """Computes steps (chunks of several sequences); results come in the order of submission."""

    capacity: Capacity
    is_paged: bool
    num_steps: int
    """The number of stages that compute at the same time, each another step."""
    runs_ahead: bool
    """True if one step more is to be in flight (see `Scheduler`)."""

    def start(self) -> None:
        """Warm up, and set the final capacity and `is_paged`. Called in the thread of `wait`."""

    def submit(self, chunks: Sequence[Chunk]) -> None:
        """Queue a step, or launch it; raise the same errors as `wait`."""

    def wait(self) -> Result | None:
        """Wait for the next result; return None if `wake` was called and no result is ready.

        Raises
        ------
        MachineError
            If a GPU or a process is lost: all steps in flight are lost, and no further step runs.
        """

    def wake(self) -> None:
        """Make `wait` return; may be called from any thread."""

    def forget(self, sequence: int) -> None:
        """Free the state kept for a sequence (by its number) that has ended."""

    def busy_seconds(self) -> dict[str, float]:
        """Return the computing seconds of each device; empty if they are unknown."""

    def peaks(self) -> list[PeakBytes]:
        """Return the peak memory of each device; final once the executor is closed."""

    def fallbacks(self) -> list[Fallback]:
        """Return the features that aren't used."""

    def close(self) -> None:
        """Stop computing and free all resources."""


class InlineExecutor:
    """Computes steps in this process, one after another.

    On a GPU `submit` launches the kernels of a step, and `wait` waits for its tokens.

    Parameters
    ----------
    model : PreTrainedModel
        On one device, or dispatched over several.
    capacity : Capacity
        For a model that can't use a paged cache, `start` replaces it by one page per sequence, and
        each prompt is computed in a single step.
    workload : Workload
        The plan's workload.
    warm_up : {"first", "largest", "every"}
        The steps to run in `start`. The forecast of a paged cache assumes "every".
    plan : Plan, optional
        The model's plan, if the model has just been loaded: its measured memory is then published
        next to the forecast, for `duoka top`.
    """

    num_steps = 1
    runs_ahead = False

    def __init__(
        self,
        model: PreTrainedModel,
        capacity: Capacity,
        workload: Workload = _PLAIN,
        *,
        warm_up: WarmUp = "first",
        plan: Plan | None = None,
    ) -> None:
        self._resources = ExitStack()
        self._publisher = None
        if plan is not None:
            shares = BusyShares(self.busy_seconds)
            self._publisher = Publisher(plan, model, plan.devices, busy_shares=shares)
            self._resources.callback(self._publisher.close)
        self._open_model = partial(_open_model, model, capacity, workload, warm_up)
        self._devices = set(map(str, computing_devices(model)))
        self.capacity = capacity
        # When each step in flight began, its parts, and what is sampled for each part.
        self._steps: deque[_StepInFlight] = deque()
        self._woken = threading.Event()
        self._busy_seconds = self._idle_since = 0.0

    def start(self) -> None:
        """See `Executor`. In the computing thread, as cuBLAS has a workspace per thread."""
        self._model = self._open_model()
        self._resources.callback(self._model.close)
        self.is_paged = isinstance(self._model, PagedModel)
        self._fallbacks = self._model.fallbacks if isinstance(self._model, PagedModel) else []
        capacity = self.capacity
        self.runs_ahead = isinstance(self._model, PagedModel) and self._model.runs_ahead
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
        begin = time.perf_counter()
        # Without pages no chunk can be recomputed, so each succeeds or fails by itself.
        single: list[Sequence[Chunk]] = [[chunk] for chunk in chunks]
        parts = [chunks] if self.is_paged else single
        sampled = [self._attempt(partial(self.sample, part)) for part in parts]
        self._steps.append((begin, parts, sampled))

    def wait(self) -> Result | None:
        """See `Executor`."""
        if not self._steps:
            self._woken.wait()
            self._woken.clear()
            return None
        begin, parts, sampled = self._steps.popleft()
        results = [
            tokens
            if isinstance(tokens, Exception)
            else self._attempt(partial(outcomes_of, chunks, tokens))
            for chunks, tokens in zip(parts, sampled, strict=True)
        ]
        now = time.perf_counter()
        self._busy_seconds += now - max(begin, self._idle_since)
        self._idle_since = now
        if self.is_paged:
            return results[0]
        return [result if isinstance(result, Exception) else result[0] for result in results]

    def _attempt(self, call: Callable[[], T]) -> T | Exception:
        """Return the result of a call, or its error; raise the error if a GPU is lost.

        An out-of-memory error is explained, and the memory of the failed step is freed.
        """
        try:
            return call()
        except Exception as error:  # any error of the model's code fails only these chunks
            if lost := find_lost_gpu(error):
                raise lost from error
            if isinstance(error, torch.OutOfMemoryError):
                explain(error, self._publisher)
                error.__traceback__ = None  # its frames hold tensors on the devices
                devices.give_back()
            return error

    def sample(self, chunks: Sequence[Chunk]) -> SampledTokens:
        """Compute chunks; sample the next token for each chunk with a row."""
        keep = self._model.keep_sampled if isinstance(self._model, PagedModel) else None
        return sample_rows(chunks, self.run(chunks), keep)

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute chunks; return the logits of the chunks with a row, [rows, vocabulary].

        The logits of a paged model may have padding rows at the end.
        """
        return self._model.run(chunks)

    def wake(self) -> None:
        """See `Executor`."""
        self._woken.set()

    def busy_seconds(self) -> dict[str, float]:
        """See `Executor`; empty with several devices, whose shares of the time aren't measured."""
        if len(self._devices) > 1:
            return {}
        return dict.fromkeys(self._devices, self._busy_seconds)

    def peaks(self) -> list[PeakBytes]:
        """See `Executor`."""
        return list(filter(None, map(devices.peak_bytes, sorted(self._devices))))

    def fallbacks(self) -> list[Fallback]:
        """See `Executor`."""
        return self._fallbacks

    def forget(self, sequence: int) -> None:
        """See `Executor`."""
        if isinstance(self._model, CachedModel):
            self._model.forget(sequence)

    def close(self) -> None:
        """See `Executor`; the model's memory is freed once nothing else references the model."""
        self._resources.close()
        self._steps.clear()
        # These form reference cycles, which only the garbage collector would free.
        self._publisher = None
        for name in ("_open_model", "_model"):
            vars(self).pop(name, None)


def sample_rows(
    chunks: Sequence[Chunk], logits: Tensor, keep: Callable[[Tensor], None] | None = None
) -> SampledTokens:
    """Sample the next token for each chunk with a row, as `sample` does.

    `logits` are [rows, vocabulary]; rows beyond the chunks' are padding.
    """
    rows = [chunk.row for chunk in chunks if chunk.row is not None]
    return sample(logits, rows + [_PADDING_ROW] * (len(logits) - len(rows)), keep)


def outcomes_of(chunks: Sequence[Chunk], sampled: SampledTokens) -> list[Outcome]:
    """Wait for the tokens of chunks; the outcome of a chunk without a row is None."""
    choices = iter(sampled.choices())
    return [None if chunk.row is None else next(choices) for chunk in chunks]


def _open_model(
    model: PreTrainedModel, capacity: Capacity, workload: Workload, warm_up: WarmUp
) -> PagedModel | CachedModel:
    """Open the model with a paged cache if possible, otherwise with a cache per sequence."""
    if workload.cache in _PAGEABLE_CACHES and not workload.images and reads_pages(model):
        # Raises ModelError if the model's code needs more than causal attention.
        tolerated = () if workload.adapters else (ModelError,)
        with suppress(*tolerated), ExitStack() as undo, reading_pages(model):
            paged = PagedModel(model, capacity, runs_ahead=_is_asynchronous(model))
            undo.callback(paged.close)
            paged.warm_up(warm_up)
            COUNTS.clear()
            undo.pop_all()
            return paged
    return CachedModel(model, workload)


def _is_asynchronous(model: PreTrainedModel) -> bool:
    """Return True if a model is on a single GPU, which computes while the host goes on."""
    devices = {parameter.device for parameter in model.parameters()}
    return len(devices) == 1 and devices.pop().type == "cuda"

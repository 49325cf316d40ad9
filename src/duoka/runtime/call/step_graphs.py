"""CUDA graphs of decode steps: the kernels of a step are recorded once, and replayed by one call.

A step of a given number of tokens always launches the same kernels, with the same sizes; only the
numbers in the step's table differ. So the kernels read the table from a fixed address, and a step
copies its own table there before the replay. The host then makes one copy and one launch instead
of a thousand launches.

Graphs of one device share a memory pool, from which their tensors are allocated while they are
recorded. Graphs are replayed one at a time, and the result of one is read before the next is
replayed, so all graphs may use the same memory: recording the largest first makes the pool as large
as the largest graph needs.

A layer whose experts are computed on the host divides a step into several graphs: a replay launches
the graph before the layer, computes the experts, and launches the next graph.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from duoka.errors import ModelError
from duoka.models.quantization.host_experts import host_work_by

from ..lost_gpu import find_lost_gpu

_LOG = logging.getLogger(__name__)
TOLERANCE = 0.02  # bfloat16 rounds by 0.004


class StepGraph(NamedTuple):
    """The recorded kernels of a step: launches of graphs, with work of the host between them.

    A replay reads the tensors `inputs` and writes `outputs`. Their memory belongs to the pool: it
    holds the values of the latest replay until another graph of the pool is replayed.
    """

    parts: tuple[Callable[[], object], ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        """Run all kernels; the host waits for the GPU only if it has work between them."""
        for part in self.parts:
            part()


Recorded = tuple[Sequence[Tensor], Sequence[Tensor]]
"""The inputs and outputs of recorded kernels."""


class StepGraphs:
    """The graphs of a device, by key, with one memory pool; `is_usable` if it can have any.

    `fault` is the reason why it has none although it could; else empty.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, StepGraph] = {}
        self._pool: Any = None
        self.is_usable = device.type == "cuda"
        self.fault = ""

    def get(self, key: Hashable) -> StepGraph | None:
        """Return the graph of a key; None if it wasn't recorded."""
        return self._graphs.get(key)

    def clear(self) -> None:
        """Free all graphs and their memory pool."""
        self._graphs.clear()
        self._pool = None

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Log any error in the scope as a warning, and free the graphs: steps run without them.

        A lost GPU is raised.
        """
        try:
            yield
        except Exception as error:  # whatever CUDA refuses in the model's code
            try:
                torch.cuda.synchronize(self._device)  # fails if it wasn't a refusal
            except RuntimeError as failure:
                raise find_lost_gpu(failure) or failure from error
            self.clear()
            self.is_usable = False
            self.fault = str(error).partition("\n")[0][:200] or type(error).__name__
            _LOG.warning("%s: decode steps run without CUDA graphs: %s", self._device, self.fault)

    def record(self, key: Hashable, run: Callable[[], Recorded]) -> StepGraph:
        """Record the kernels that `run` launches; it returns their inputs and outputs.

        Nothing is computed. An error of CUDA or of `run` is raised.
        """
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        pool, stream = self._pool, _recording_stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            recording = _Recording(pool)
            try:
                with host_work_by(recording.add_host_work):
                    recorded = run()
            except BaseException:
                with suppress(RuntimeError):  # CUDA reports that the recording is invalid
                    recording.end_graph()
                raise
            recording.end_graph()
        inputs, outputs = (tuple(map(_without_ownership, tensors)) for tensors in recorded)
        self._graphs[key] = step_graph = StepGraph(tuple(recording.parts), inputs, outputs)
        return step_graph


class _Recording:
    """The parts of a step that is being recorded on the current stream."""

    def __init__(self, pool: Any) -> None:
        self.parts: list[Callable[[], object]] = []
        self._pool = pool
        self._begin_graph()

    def _begin_graph(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Threads that copy results of other work don't disturb the recording.
        self._graph.capture_begin(self._pool, capture_error_mode="thread_local")

    def end_graph(self) -> None:
        """End the graph of the kernels since the latest work of the host."""
        self._graph.capture_end()
        self.parts.append(self._graph.replay)

    def add_host_work(self, work: Callable[..., object], tensors: Sequence[Tensor]) -> None:
        """Let replays call `work` with these tensors between the kernels before and after it."""
        self.end_graph()
        self.parts.append(partial(work, *map(_without_ownership, tensors)))
        self._begin_graph()


def refuse_difference(computed: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Raise ModelError if a graph's outputs differ from those of the same kernels without it.

    `DUOKA_ATTENTION=flash` omits this comparison, too.
    """
    if os.environ.get("DUOKA_ATTENTION") == "flash":
        return
    difference = relative_difference(computed, expected)
    if not difference <= TOLERANCE:  # also NaN
        raise ModelError(f"results differ by {difference:.1%}")


def relative_difference(computed: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest relative difference of tensors from the expected ones; NaN if one has."""
    differences = [torch.zeros(())]
    for result, right in zip(computed, expected, strict=True):
        distance = (result.cpu().float() - right.cpu().float()).norm()
        differences.append(distance / right.cpu().float().norm().clamp(min=1e-30))
    return float(torch.stack(differences).max())


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a device's graphs are recorded; cuBLAS has a workspace for it."""
    return torch.cuda.Stream(device)


class _Memory:
    """The memory of a tensor, as other libraries pass it to torch; it isn't kept alive."""

    def __init__(self, tensor: Tensor) -> None:
        num_bytes = tensor.numel() * tensor.itemsize
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False), "shape": (num_bytes,), "typestr": "|u1",
            "version": 3,
        }  # fmt: skip


# A graph's tensors keep their memory from later graphs of the pool. What these write is read before
# this graph is replayed again, so their memory is given back, and only the address is kept.
def _without_ownership(tensor: Tensor) -> Tensor:
    """Return a tensor over the memory of a contiguous tensor, which may be given back."""
    assert tensor.is_contiguous(), "a graph's inputs and outputs are contiguous"
    alias = torch.as_tensor(_Memory(tensor), device=tensor.device)
    return alias.view(tensor.dtype).view(tensor.shape)

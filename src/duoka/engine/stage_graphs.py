"""CUDA graphs of one stage's part of decode steps.

The graph has the kernels between the tensors that the stage receives and those that it sends. A
step receives its tensors, copies them to the graph's inputs, replays the graph, and sends its
outputs. `runtime.call.step_graphs` explains the graphs of a whole step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from duoka.forecast.serving import StepSize
from duoka.runtime.call.paged_model import PagedModel
from duoka.runtime.call.paged_step import PagedStep, fill
from duoka.runtime.call.step_graphs import Recorded, refuse_difference
from duoka.stages.channels import Channel, TensorMessage
from duoka.stages.interceptor import BlockInterceptor
from duoka.stages.micro_batch import StageMicroBatch

MakeMicroBatch = Callable[[Channel], StageMicroBatch]
"""Makes a micro-batch of a stage's step that receives and sends over a channel."""


class KeptTensors:
    """A channel that keeps all tensors by the number of their transfer.

    Tensors are received from another `channel`, or from `inputs`, or have undefined values.
    """

    def __init__(
        self,
        device: torch.device,
        channel: Channel | None = None,
        inputs: dict[int, Tensor] | None = None,
    ) -> None:
        self.received: dict[int, Tensor] = {} if inputs is None else inputs
        self.sent: dict[int, Tensor] = {}
        self._device, self._channel = device, channel

    def outputs(self, logits: Tensor | None) -> list[Tensor]:
        """Return the sent tensors, then the logits if there are any."""
        return [*self.sent.values(), *([] if logits is None else [logits.contiguous()])]

    def send(self, message: TensorMessage, tensor: Tensor) -> None:
        """See `Channel`."""
        self.sent[message.transfer] = tensor.contiguous()
        if self._channel is not None:
            self._channel.send(message, tensor)

    def receive(self, message: TensorMessage, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See `Channel`."""
        if self._channel is not None:
            tensor = self._channel.receive(message, sizes, dtype)
            self.received[message.transfer] = tensor.clone()  # model code may change its tensor
            return tensor
        if message.transfer not in self.received:
            self.received[message.transfer] = torch.empty(sizes, dtype=dtype, device=self._device)
        return self.received[message.transfer]


class StageGraphs:
    """Computes the stages on a device, decode steps by their graphs once these are recorded."""

    def __init__(
        self, paged: PagedModel, interceptor: BlockInterceptor, device: torch.device
    ) -> None:
        self._paged, self._interceptor, self._device = paged, interceptor, device
        # By stage and tokens: the transfers of received and of sent tensors, by number.
        self._transfers: dict[tuple[int, int], tuple[list[int], list[int]]] = {}

    def forward(self, stage: int, step: PagedStep, micro_batch: StageMicroBatch) -> Tensor | None:
        """Compute a stage of a step; return the logits in the last stage, else None."""
        key = stage, step.num_tokens
        graph = self._paged.graphs.get(key) if step.is_decoding else None
        if graph is None:
            return micro_batch.forward(self._interceptor, self._paged.call(step, self._device))
        received, sent = self._transfers[key]
        table, *inputs = graph.inputs
        fill(table, step.numbers())
        for number, tensor in zip(received, inputs, strict=True):
            tensor.copy_(micro_batch.receive(number))
        graph.replay()
        for number, tensor in zip(sent, graph.outputs, strict=False):
            micro_batch.send(number, tensor)
        return graph.outputs[-1] if len(graph.outputs) > len(sent) else None

    def record(
        self,
        stage: int,
        computed: tuple[PagedStep, KeptTensors, Tensor | None],
        make: MakeMicroBatch,
    ) -> None:
        """Record the graph of a stage, and compare its results with those of a computed step.

        `computed` has a decode step, its tensors, and its logits in the last stage. After an error,
        or if the results differ, all stages of the device go on without graphs.
        """
        step, tensors, logits = computed
        if not self._paged.graphs.is_usable or not self._paged.cache.capacity.graph_steps():
            return
        with self._paged.graphs.trying():
            empty = KeptTensors(self._device)
            key = stage, step.num_tokens
            size = StepSize(tokens=step.num_tokens, rows=1, logits=len(step.last_rows))
            self._paged.graphs.record(key, lambda: self._record(size, empty, make(empty)))
            self._transfers[key] = [*empty.received], [*empty.sent]
            replayed = KeptTensors(self._device, inputs=tensors.received)
            result = self.forward(stage, step, make(replayed))
            refuse_difference(replayed.outputs(result), tensors.outputs(logits))

    def _record(
        self, size: StepSize, tensors: KeptTensors, micro_batch: StageMicroBatch
    ) -> Recorded:
        """Run a stage for its graph; return its table and received tensors, then its outputs."""
        run, table = self._paged.call_for_graph(size)
        logits = micro_batch.forward(self._interceptor, run)
        return [table, *tensors.received.values()], tensors.outputs(logits)

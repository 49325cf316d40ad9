"""One micro-batch in one stage: its part of `forward`, and of backward.

    stage 0                      stage 1
    embed → layer 0 ──hidden──▶ (leaf) layer 1 → loss
            edge ◀──gradient─── (leaf).grad

Tensors received from other stages are leaves of this stage's autograd graph: their gradients go
back to the sender. This stage's backward begins at the sent tensors, with the gradients that their
receivers send back. Of a sent tensor only its edge in the graph is kept, not its data.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from duoka.errors import ModelError
from duoka.runtime.dispatch.arguments import mapped, mapped_call, shared_in, tensors_in

from .channels import Channel, TensorMessage
from .interceptor import BlockInterceptor, PlacedBlock
from .placeholder import AroundBlocks, Placeholder, is_elsewhere, unstageable
from .route import Route, Shape

_UNPLANNED = -1


@dataclass(eq=False)
class StageMicroBatch:
    """Runs one micro-batch through one stage of a route, on the device of the stage."""

    route: Route
    stage: int
    number: int
    channel: Channel
    device: torch.device
    learns: bool = True

    def __post_init__(self) -> None:
        self._last_call = self.route.last_calls()[self.stage]
        self._last_uses = self.route.last_uses()
        self._next_call = 0
        # By number of the transfer: received tensors still in use; all numbers received so far; the
        # graph edge of each sent tensor, None without a gradient; gradients of received tensors.
        self._received: dict[int, Tensor] = {}
        self._received_numbers: set[int] = set()
        self._sent: dict[int, GradientEdge | None] = {}
        self._gradients: dict[int, Tensor] = {}
        self._around = AroundBlocks()

    def forward(self, interceptor: BlockInterceptor, run: Callable[[], Tensor]) -> Tensor | None:
        """Run this stage's part of `forward`; return its result in the last stage, else None."""
        try:
            with interceptor.deciding(self.call), self._around:
                result = run()
        except _LeaveForward:
            return None
        finally:
            self._received.clear()
        return result if self.stage == self.route.num_stages - 1 else None

    def abandon(self) -> None:
        """After a failure receive all other tensors and send zeros, so that no stage waits."""
        for number, transfer in enumerate(self.route.transfers):
            if transfer.target == self.stage and number not in self._received_numbers:
                with suppress(torch.OutOfMemoryError):  # raised after the message was received
                    self.receive(number)
            if transfer.source == self.stage and number not in self._sent:
                zeros = torch.zeros(transfer.shape.sizes, dtype=transfer.shape.dtype)
                self.channel.send(self._message(number), zeros)

    def backward(self, loss: Tensor | None = None) -> None:
        """Run this stage's part of backward, and send gradients to the stages of its inputs."""
        # Backward begins at all roots at once: the loss in the last stage, and the edges of the
        # sent tensors, each with the gradient that its receiver has sent back. Afterwards the
        # gradients of received tensors, caught by `_Arrival`, are sent to their source stages.
        route = self.route
        roots: list[Any] = []
        gradients: list[Tensor | None] = []
        for number, edge in self._sent.items():
            if edge is not None:
                roots.append(edge)
                gradients.append(self.receive(number, is_gradient=True))
        if loss is not None:
            roots.append(loss)
            gradients.append(None)
        self._sent.clear()
        if roots:
            torch.autograd.backward(roots, gradients)
        for number, transfer in enumerate(route.transfers):
            if transfer.target == self.stage and transfer.requires_grad:
                gradient = self._gradients.pop(number, None)
                if gradient is None:  # the loss doesn't depend on the tensor
                    shape = transfer.shape
                    gradient = torch.zeros(shape.sizes, dtype=shape.dtype, device=self.device)
                self.channel.send(self._message(number, is_gradient=True), gradient)

    # What two processes do with the calls of a route:
    #
    #     call      process of stage 0             process of stage 1
    #     embed     runs                           returns a placeholder
    #     layer 0   runs                           returns a placeholder
    #     layer 1   sends h, leaves `forward`      receives h, runs
    #     head      is not reached                 runs; `forward` returns the logits or the loss
    def call(
        self, block: PlacedBlock, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Decide on a call of the route: run it, or return placeholders; see `Decider`."""
        index = self._next_call
        self._next_call += 1
        calls = self.route.calls
        if index >= len(calls) or calls[index].block != block.name:
            raise _differs_from_trace(block)
        call = calls[index]
        # Every process makes all calls of the route. Each tensor among the arguments is paired with
        # its planned arrival: the number of a transfer, which the source stage sends, the target
        # stage receives and any other ignores; or None for a tensor that doesn't cross.
        arrivals = iter(call.arrivals)

        def passed(tensor: Tensor) -> Tensor:
            number = next(arrivals, _UNPLANNED)
            if number == _UNPLANNED:
                raise _differs_from_trace(block)
            return self._send_or_receive(number, tensor)

        args, kwargs = mapped_call(args, kwargs, passed, block.caches)
        for number in [n for n in self._received if self._last_uses[n] == index]:
            del self._received[number]
        if index == self._last_call and call.stage != self.stage:
            raise _LeaveForward
        if block.is_container:
            return forward(*args, **kwargs)
        if call.stage == self.stage:
            return self._run(block, forward, args, kwargs)
        result, written = mapped(call.outputs, self._placeholder, self._placeholder)
        for shared, entries in zip(shared_in(args, kwargs), written, strict=True):
            shared.update(entries)
        return result

    def _run(
        self, block: PlacedBlock, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a block of this stage, outside the mode of code around blocks."""
        if any(map(is_elsewhere, tensors_in((args, kwargs)))):
            raise unstageable(f"{block.name} needs a tensor of another stage that wasn't sent")
        with self._around.paused():
            return forward(*args, **kwargs)

    def _send_or_receive(self, number: int | None, tensor: Tensor) -> Tensor:
        """Send or receive a tensor argument, if this stage is the source or target of its transfer.

        Return the received tensor in the target stage, else the given one.
        """
        if number is None:
            return tensor
        transfer = self.route.transfers[number]
        if transfer.source == self.stage and number not in self._sent:
            self.send(number, tensor)
        if transfer.target != self.stage:
            return tensor
        if number not in self._received:
            self._received[number] = self._receive_leaf(number)
        return self._received[number]

    def send(self, number: int, tensor: Tensor) -> None:
        """Send the tensor of a transfer."""
        transfer = self.route.transfers[number]
        if tuple(tensor.shape) != transfer.shape.sizes:
            raise unstageable(
                f"a tensor of {tuple(tensor.shape)} is sent to a stage that expects "
                f"{transfer.shape.sizes}"
            )
        keeps = self.learns and transfer.requires_grad and tensor.requires_grad
        self.channel.send(self._message(number), tensor.detach())
        self._sent[number] = get_gradient_edge(tensor) if keeps else None

    def _receive_leaf(self, number: int) -> Tensor:
        """Receive a transfer as a leaf of this stage's graph, if its gradient is needed."""
        if not (self.learns and self.route.transfers[number].requires_grad):
            return self.receive(number)

        with torch.enable_grad():
            anchor = torch.empty(0, device=self.device, requires_grad=True)
            arrived: Tensor = _Arrival.apply(anchor, self, number)  # type: ignore[no-untyped-call]
        return arrived

    def receive(self, number: int, *, is_gradient: bool = False) -> Tensor:
        """Receive the tensor of a transfer, or the gradient of a sent one."""
        shape = self.route.transfers[number].shape
        if not is_gradient:
            self._received_numbers.add(number)
        return self.channel.receive(
            self._message(number, is_gradient=is_gradient), shape.sizes, shape.dtype
        )

    def _message(self, number: int, *, is_gradient: bool = False) -> TensorMessage:
        transfer = self.route.transfers[number]
        return TensorMessage(transfer.source, transfer.target, number, self.number, is_gradient)

    def _placeholder(self, value: Any) -> Any:
        """Replace a `Shape` by a placeholder; return other values as they are."""
        if not isinstance(value, Shape):
            return value
        return Placeholder.of(_meta_tensor(value), self.device)


def _differs_from_trace(block: PlacedBlock) -> ModelError:
    """Return the error for a call that the traced route doesn't have."""
    return ModelError(
        f"the model called {block.name} differently from its trace",
        hint="pipeline stages need code that doesn't depend on the values of a batch",
    )


# The anchor is an empty tensor that requires gradients, so that autograd records this function. A
# real leaf wouldn't do: model code may change the received tensor in place, which autograd refuses
# for a leaf that requires gradients.
class _Arrival(torch.autograd.Function):
    """Receives a tensor in forward, and keeps its gradient for the sender in backward."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, micro_batch: StageMicroBatch, number: int) -> Tensor:
        ctx.micro_batch, ctx.number = micro_batch, number
        return micro_batch.receive(number)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.micro_batch._gradients[ctx.number] = gradients[0]
        return None, None, None


class _LeaveForward(BaseException):  # model code must not catch it
    """Raised to leave `forward` when this stage has nothing more to run or send."""


@lru_cache(2**12)
def _meta_tensor(shape: Shape) -> Tensor:
    """Return a meta tensor of a shape, made outside inference mode and shared by all callers."""
    with torch.inference_mode(False):
        return torch.empty(shape.sizes, dtype=shape.dtype, device="meta")

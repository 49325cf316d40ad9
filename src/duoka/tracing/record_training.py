"""Recording training: what the forward and the backward pass of a micro-batch do, block by block.

In the backward pass there are no calls of modules to sort events by. Every operation there belongs
to a node of autograd's graph, and nodes are numbered in the order in which the forward pass made
them: so its number tells the block. A layer that is computed again (gradient checkpointing) is so
for a node, too.

In a tape of the backward pass the numbers of allocations go on where those of the block's forward
tape end, so that each allocation of a micro-batch has a number of its own.

A block that would do what an earlier one did is run as next to nothing: a stand-in makes its
outputs in the forward pass, and the gradients of its arguments in the backward pass, so that its
neighbours find what they would. It keeps nothing for the backward pass: what it does itself is
known from the block that it is like.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from duoka import virtual
from duoka.models.chunked_loss import chunked_head
from duoka.runtime.dispatch.arguments import tensors_in

from .blocks import ModuleGroup
from .record import Home, RecordedPass, Recorder, Skipper, device_of, picture_made
from .record_returns import ReturningRecorder


class ChunkBytes(int):
    """Bytes for a chunk of the loss, which has `loss_chunk_tokens`."""


class RecordedMicroBatch(NamedTuple):
    """What one micro-batch did."""

    forward: RecordedPass
    backward: RecordedPass


class TrainingRecorder(Recorder):
    """A listener that sorts the events of training into blocks."""

    def __init__(self, model: nn.Module, groups: Sequence[ModuleGroup], *, skip: bool) -> None:
        super().__init__(model, groups, skip=False)
        if skip:
            self._skipper = TrainingSkipper(model, groups)
        owners = {owner: index for index, group in enumerate(groups) for owner in group.owners}
        self._block_of: dict[int, int] = {}
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                self._block_of.setdefault(id(parameter), owners[name])
        self._is_backward = False
        # The number of the chunk of the loss that runs. All allocate what the first one does.
        self._chunk: int | None = None
        # Whether some module was called again in the backward pass.
        self.computes_again = False
        self._first_numbers: list[int] = [0] * len(groups)
        # The numbers of autograd's nodes from which on a block's begin, and these blocks.
        self._begins: list[int] = []
        self._blocks: list[int] = []
        # Of each block's arguments the numbers of their gradients, by position.
        self._gradients: dict[tuple[int, int], int] = {}

    def __enter__(self) -> Self:
        self._chunked = chunked_head(self._model)
        if self._chunked is not None:
            self._chunked.chunk_begins = self._begin_chunk
        super().__enter__()
        self._handles.append(register_module_forward_pre_hook(self._call))
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self._chunked is not None:
            self._chunked.chunk_begins = None

    def _begin_chunk(self, number: int | None) -> None:
        self._chunk = number

    def _call(self, module: nn.Module, args: Any) -> None:
        self.computes_again |= self._is_backward

    def record_training(self, forward: Callable[[], torch.Tensor]) -> RecordedMicroBatch:
        """Run one micro-batch: a forward pass, whose loss is returned, and the backward pass."""
        self._is_backward = False
        self._first_numbers = [0] * len(self._groups)
        self._begins, self._blocks, self._gradients = [0], [0], {}
        losses: list[torch.Tensor] = []
        first = self.record(lambda: losses.append(forward()))
        # The backward pass begins with it where the caller is.
        first.tapes[-1].passing -= {argument.home for argument in super()._arguments(losses)}
        self._number -= 1  # both passes are one micro-batch, as references to it go
        self._is_backward = True
        self._first_numbers = [len(tape.sizes) for tape in first.tapes]

        def backward() -> None:
            self._current = len(self._groups) - 1
            losses.pop().backward()

        second = self.record(backward)
        self._is_backward = False
        second.like = first.like
        self._resolve(second)
        _keep_arguments(first, second)
        return RecordedMicroBatch(first, second)

    def allocated(self, gpu: object, storage_id: int, num_bytes: int) -> None:
        """Put an allocation on the tape of the block that runs."""
        if self._chunk:
            return
        if self._chunk == 0:
            num_bytes = ChunkBytes(num_bytes)
        self._locate()
        tape, block = self._tapes[self._current], self._current
        number = self._first_numbers[block] + len(tape.sizes)
        self._homes[storage_id] = (self._number, block, number)
        tape.sizes.append(num_bytes)
        tape.events.append(None)

    def freed(self, gpu: object, storage_id: int) -> None:
        """Put a free on the tape of the block that runs."""
        self._locate()
        super().freed(gpu, storage_id)

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add an operation's arithmetic and memory traffic to the block that runs."""
        self._locate()
        super().operation(func, args, kwargs, result)

    def _begin(self, block: int) -> bool:
        if self._is_backward:
            return False  # a layer is computed again
        self._begins.append(torch._C._autograd._get_sequence_nr())
        self._blocks.append(block)
        return super()._begin(block)

    def _enter(self, first: int, tensors: Sequence[torch.Tensor]) -> None:
        if not self._is_backward:
            for tensor in tensors:
                self._follow(tensor, None, by=first)
            self._entered += self._moved_to(first, super()._arguments(tensors))

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        self._begin(len(self._groups) - 1)
        super()._leave(model, args, output)

    def _arguments(self, tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
        for position, tensor in enumerate(tensors):
            self._follow(tensor, position)
            yield from super()._arguments([tensor])

    def _follow(self, tensor: Any, position: int | None, *, by: int | None = None) -> None:
        """Note what comes back to an argument's maker: the gradient, as another block made it.

        It comes `by` way of the block to which the argument was brought for those behind it.
        """
        if not isinstance(tensor, virtual.VirtualTensor) or not tensor.requires_grad:
            return
        home = self.home_of(tensor)
        if home is None:
            return
        maker = home[1]

        def note(gradient: Any) -> None:
            if isinstance(gradient, virtual.VirtualTensor):
                origin = self.home_of(gradient)
                if origin is not None and origin[1] != maker and origin[0] == self._number:
                    self._tapes[maker].reads[origin] = gradient.nbytes
                    if by is not None and maker < by < origin[1]:
                        self._tapes[by].reads[origin] = gradient.nbytes
                    if position is not None:
                        self._gradients[origin[1], position] = origin[2]

        leaf: Any = tensor
        leaf.register_hook(note)

    def _resolve(self, second: RecordedPass) -> None:
        """Give the gradients that stand-ins made the numbers of those that they stand for."""

        def real(home: Home) -> Home:
            number, block, index = home
            if index >= 0 or number != self._number:
                return home
            return number, block, self._gradients[second.like[block], placeholder(index)]

        for block, tape in enumerate(second.tapes):
            if second.like[block] == block:
                tape.events = [None if home is None else real(home) for home in tape.events]
                tape.reads = {real(home): size for home, size in tape.reads.items()}

    def _locate(self) -> None:
        """Find the block of the node that runs; the backward pass never goes up again."""
        if not self._is_backward:
            return
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return
        if type(node).__name__ == "AccumulateGrad":
            block = self._block_of.get(id(node.variable), self._current)
        else:
            place = bisect_right(self._begins, node._sequence_nr()) - 1
            block = self._blocks[place]
        self._current = min(self._current, block)

    def _keep(self) -> None:
        """What the backward pass leaves behind: gradients. What the forward pass does, is used."""
        if self._is_backward:
            super()._keep()

    def _outlives(self, home: Home) -> bool:
        return home[2] >= self._first_numbers[home[1]]


class ReturningTrainingRecorder(TrainingRecorder, ReturningRecorder):
    """A recorder of training that hears explicit moves."""

    def _moved_back(self, result: torch.Tensor, source: torch.Tensor, block: int) -> torch.Tensor:
        self._follow(source, None)
        return super()._moved_back(result, source, block)


def _keep_arguments(forward: RecordedPass, backward: RecordedPass) -> None:
    """Take away frees of what a block that was left out keeps for its backward pass.

    Its stand-in keeps no arguments, so that they end in the forward pass, in some other block.
    """
    arguments = {
        (number, at + block - first, index)
        for block, first in enumerate(forward.like)
        if block != first
        for number, at, index in filter(None, backward.tapes[first].events)
        if 0 <= at < first
    }
    for tape in forward.tapes:
        if tape.matmul_at is not None:
            tape.matmul_at -= sum(event in arguments for event in tape.events[: tape.matmul_at])
        tape.events = [event for event in tape.events if event not in arguments]


def placeholder(position: int) -> int:
    """The number of a stand-in's gradient of an argument, until the real one is known."""
    return -1 - position


class TrainingSkipper(Skipper):
    """Recognises blocks that are alike, and stands in for them with a way back."""

    def __init__(self, model: nn.Module, groups: Sequence[ModuleGroup]) -> None:
        super().__init__(model, groups)
        # Of each block that ran the homes of its arguments that get gradients.
        self._differentiated: dict[int, set[Home]] = {}

    def call(
        self,
        recorder: Recorder,
        place: tuple[int, Any],
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run a block, or make its outputs only where one that is like it has run."""
        homes = self._differentiated[place[0]] = set()
        for tensor in tensors_in((args, kwargs)):
            if isinstance(tensor, virtual.VirtualTensor) and tensor.requires_grad:
                home = recorder.home_of(tensor)
                if home is not None:
                    homes.add(home)
        return super().call(recorder, place, forward, args, kwargs)

    def speaks_for_others(self, recorder: Recorder, first: int) -> bool:
        """Whether what a block does tells what others do that are like it.

        One whose argument others were given as well (a residual that is a block's argument) keeps
        it alive for its backward pass, which a stand-in doesn't, and adds up the gradients that all
        of them make, which lie elsewhere for another block.
        """
        if any(recorder.gives_others(first, home) for home in self._differentiated[first]):
            return False
        return super().speaks_for_others(recorder, first)

    def stand_in(self, picture: Any, recorder: Recorder, block: int, call: Any) -> Any:
        """Make a block's outputs, with a way back to its arguments."""
        outputs: list[tuple[Any, torch.dtype, int]] = []

        def note(shape: Any, dtype: torch.dtype, number: int) -> torch.Tensor:
            outputs.append((shape, dtype, number))
            return torch.empty(0)

        picture_made(picture, call, note)
        stand_in: Any = _StandIn
        tensors = iter(stand_in.apply((recorder, block, outputs), *tensors_in(call)))
        return picture_made(picture, call, lambda *_: next(tensors))


class _StandIn(torch.autograd.Function):
    """Tensors out of nothing, and gradients out of nothing."""

    @staticmethod
    def forward(ctx: Any, task: Any, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        recorder, block, outputs = task
        ctx.task = recorder, block
        ctx.pictures = [(tensor.shape, tensor.dtype, tensor.device) for tensor in arguments]
        device = device_of(arguments)
        tensors = []
        for shape, dtype, number in outputs:
            tensor: Any = torch.empty(shape, dtype=dtype, device=device)
            recorder.adopt(tensor, block, number)
            tensors.append(tensor)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        recorder, block = ctx.task
        gradients: list[torch.Tensor | None] = []
        for position, (shape, dtype, device) in enumerate(ctx.pictures):
            gradient: Any = None
            if ctx.needs_input_grad[1 + position]:
                gradient = torch.empty(shape, dtype=dtype, device=device)
                recorder.adopt(gradient, block, placeholder(position))
            gradients.append(gradient)
        return None, *gradients

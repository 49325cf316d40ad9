"""Memoised blocks: a block is replaced by a stub where an equal block has run.

A decoder of 40 equal layers is recorded by running three of them. A layer is run in full unless one
with equal modules, equal arguments and an equal predecessor has run before::

    embedding  layer 0  layer 1  layer 2  layer 3  ...  layer 38  layer 39  norm
    run        run      run      stub     stub          stub      run       run
               other    memo     = layer 1                        other
               before   of all                                    successor

A stub allocates the block's outputs under the ids that the block itself would have given them, so
that later blocks free and read what they would have. It allocates nothing else: the allocation
trace of a stubbed block is that of the block it is like, shifted by the distance of the two.

In training a stub is a node of autograd's graph. Its backward pass allocates the gradients of the
block's arguments. Their ids are only known once the block that ran has made its own gradients,
after the stubs (the backward pass runs from the last block to the first): until then argument `p`
has the number ``-1 - p``, a placeholder.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from duoka import virtual
from duoka.models.quantization import parts
from duoka.runtime.dispatch.arguments import tensors_in

from .blocks import ModuleGroup
from .boundaries import find_submodule
from .recorded import AllocId, PassLog


class BlockMemo:
    """Memo of the blocks run in this pass, by everything that decides on their allocations."""

    def __init__(self, model: nn.Module, groups: Sequence[ModuleGroup], log: PassLog) -> None:
        self._log = log
        signatures: list[Any] = []
        for group in groups:
            module = find_submodule(model, group.names[0]) if len(group.names) == 1 else None
            signatures.append(None if module is None else module_signature(module))
        # Code between a block and its successor, such as a norm without parameters, runs in the
        # block's turn. In the backward pass the successor runs first.
        self._signatures = [
            None if block is None else (block, successor)
            for block, successor in zip(signatures, [*signatures[1:], None], strict=True)
        ]
        # Without gradients, a tower's layers are run in full: their outputs are freed together when
        # all have run. In training autograd keeps them in any case.
        self._last_return = max(
            (index for index, group in enumerate(groups) if group.returns_to is not None), default=0
        )
        self._memo: dict[Any, tuple[int, Any, int]] = {}
        self._like: list[int] = []
        # Of each block that ran the arguments that get gradients.
        self._differentiated: dict[int, set[AllocId]] = {}
        self._frees_far: dict[tuple[int, int], bool] = {}

    def start(self, model_blocks: list[int]) -> None:
        """Begin a pass; `model_blocks` receives for each stubbed block the number of its model."""
        self._memo, self._frees_far, self._like = {}, {}, model_blocks

    # The key has everything that decides on a block's allocations and on the ids that it refers to:
    #
    #   modules      of the block, of the one before, and of the one behind
    #   producers    of the arguments of containers, which may live through the block
    #   arguments    shape and dtype; distance of the producer, and the allocation's number there
    #
    # A trace is shifted by whole blocks: if block 2 is given (step, 1, 4), its trace stands for
    # block 7 only if that is given (step, 6, 4). Producers further back than a neighbour aren't
    # shifted, so both blocks need the same allocation, such as one mask for all layers.
    def call(
        self, block: int, producers: Any, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a block, or only allocate its outputs where an equal block has run.

        `producers` says where the arguments of its containers come from.
        """
        signature = self._signatures[block]
        arguments = tensors_in((kwargs, args))
        self._differentiated[block] = {
            storage
            for tensor in arguments
            if tensor.requires_grad and (storage := self._log.id_of(tensor)) is not None
        }
        is_in_tower = block <= self._last_return and not torch.is_grad_enabled()
        if signature is None or block == 0 or is_in_tower:
            return forward(*args, **kwargs)
        key = (
            signature,
            self._signatures[block - 1],
            producers,
            self._describe((args, kwargs), block),
        )
        model_block, outputs, num_allocations = self._memo.get(key, (block, None, 0))
        # A block that runs twice in a step is no stub of itself.
        if model_block != block and self._speaks_for_others(model_block):
            self._like[block] = model_block
            result = self._stub(outputs, block, arguments)
            # What follows in this block's turn is numbered as if the block had run.
            sizes = self._log.traces[block].sizes
            sizes += [0] * (num_allocations - len(sizes))
            return result
        positions = {id(tensor): position for position, tensor in enumerate(arguments)}
        del arguments  # the caller may drop an argument while the block runs
        result = forward(*args, **kwargs)
        outputs = self._describe(result, block, positions)
        # A stub doesn't write into a container that blocks share.
        has_written = any(id(tensor) not in positions for tensor in tensors_in((kwargs, args)))
        if _can_be_stubbed(outputs) and not has_written:
            self._memo[key] = block, outputs, len(self._log.traces[block].sizes)
        return result

    def _speaks_for_others(self, model_block: int) -> bool:
        """Return True if a block's trace holds for all blocks like this.

        It doesn't where the block frees storages of distant blocks: those of another one are not as
        far from it. Nor where an argument that gets a gradient is an argument of other blocks too,
        such as a residual: the block keeps it for its backward pass, which a stub does not, and
        adds up gradients of blocks at other distances.
        """
        traces, key = self._log.traces, (model_block, len(self._log.traces[model_block].events))
        if key not in self._frees_far:  # asked again for every block like this one
            self._frees_far[key] = any(
                freed is not None and freed[0] == self._log.step and abs(model_block - freed[1]) > 1
                for freed in traces[model_block].events
            )
        return not self._frees_far[key] and not any(
            storage in trace.reads
            for storage in self._differentiated[model_block]
            for block, trace in enumerate(traces)
            if block != model_block
        )

    def _stub(self, outputs: Any, block: int, arguments: list[torch.Tensor]) -> Any:
        """Allocate the outputs of a block; in training with gradients for its arguments."""
        # The outputs are built twice: once to list their tensors, and once with those of the stub,
        # as an autograd Function returns a flat tuple of tensors.
        wanted_outputs: list[tuple[Any, torch.dtype, int]] = []

        def note(shape: Any, dtype: torch.dtype, number: int) -> torch.Tensor:
            wanted_outputs.append((shape, dtype, number))
            return torch.empty(0)

        _rebuild(outputs, arguments, note)
        stub: Any = _Stub
        stub_outputs = iter(stub.apply((self._log, block, wanted_outputs), *arguments))
        return _rebuild(outputs, arguments, lambda *_: next(stub_outputs))

    def _describe(self, tree: Any, block: int, positions: dict[int, int] | None = None) -> Any:
        """Describe nested values by shapes, types and distances of producers, hashable.

        A tensor of `positions` is described as that argument.
        """
        if isinstance(tree, virtual.VirtualTensor):
            if positions and id(tree) in positions:
                return ("argument", positions[id(tree)])
            storage = self._log.id_of(tree)
            number = None if storage is None else storage[2]
            return ("tensor", tuple(tree.shape), tree.dtype, producer_of(block, storage), number)
        if isinstance(tree, torch.Tensor):
            return ("cpu", tuple(tree.shape), tree.dtype)
        if type(tree) in (tuple, list):
            return (type(tree), tuple(self._describe(item, block, positions) for item in tree))
        if type(tree) is dict or isinstance(tree, UserDict):
            items = ((key, self._describe(it, block, positions)) for key, it in tree.items())
            return (dict, tuple(items))
        if tree is None or isinstance(tree, (str, int, float, bool)):
            return ("value", tree)
        return ("object", id(tree))


# In the backward pass, with block 1 recorded and block 2 its stub, in step s:
#
#   block 2, stub       dx = (s, 2, -1)            argument 0's gradient, number unknown
#   block 1, recorded   free (s, 2, -1)            its trace: the gradient that it was given
#                       dx = (s, 1, 9)             a hook notes: argument 0 of block 1, number 9
#   after the pass      free (s, 2, 9)             resolved, as if block 2 had run
class _Stub(torch.autograd.Function):
    """The outputs of a block without its computation, and the gradients of its arguments."""

    @staticmethod
    def forward(ctx: Any, task: Any, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        log, block, wanted_outputs = task
        ctx.task = log, block
        ctx.arguments = [(tensor.shape, tensor.dtype, tensor.device) for tensor in arguments]
        device = _device_of(arguments)
        outputs = []
        for shape, dtype, number in wanted_outputs:
            output: Any = torch.empty(shape, dtype=dtype, device=device)
            log.adopt(output, block, number)
            outputs.append(output)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        log, block = ctx.task
        gradients: list[torch.Tensor | None] = []
        for position, (shape, dtype, device) in enumerate(ctx.arguments):
            gradient: Any = None
            if ctx.needs_input_grad[1 + position]:
                gradient = torch.empty(shape, dtype=dtype, device=device)
                log.adopt(gradient, block, placeholder(position))
            gradients.append(gradient)
        return None, *gradients


def placeholder(position: int) -> int:
    """Return the number of a stub's gradient by the argument's position, or the reverse."""
    return -1 - position


def module_signature(module: nn.Module) -> Any:
    """Describe a module without its weights and layer number, hashable."""
    settings: list[tuple[str, Any]] = []
    for name, value in sorted(vars(module).items()):
        if name in _NOT_COMPARED or any(part in name for part in _NUMBERS):
            continue
        if isinstance(value, (str, int, float, bool, type(None), torch.dtype, torch.Size)):
            settings.append((name, value))
        elif isinstance(value, (tuple, list)) and all(
            isinstance(item, (str, int, float)) for item in value
        ):
            settings.append((name, tuple(value)))
        elif callable(value):
            settings.append((name, getattr(value, "__qualname__", type(value).__qualname__)))
    tensors = tuple(
        (name, key, tuple(part.shape), part.dtype)
        for name, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        )
        for key, part in parts(tensor).items()
    )
    children = tuple((name, module_signature(child)) for name, child in module.named_children())
    return (type(module), tuple(settings), tensors, children)


_NOT_COMPARED = frozenset({"_parameters", "_buffers", "_modules", "forward"})
_NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx")


def producer_of(block: int, storage: AllocId | None) -> Any:
    """Return the distance to the block of an allocation; beyond 1, the allocation itself."""
    if storage is None:
        return None
    return block - storage[1] if block - storage[1] < 2 else storage[1:]


def _can_be_stubbed(description: Any) -> bool:
    """Return True if a block made all tensors of its outputs, or returns its arguments."""
    kind = description[0]
    if kind == "tensor":
        return bool(description[3] == 0)
    if kind in (tuple, list):
        return all(_can_be_stubbed(item) for item in description[1])
    return kind in ("argument", "value")


def _rebuild(
    description: Any, arguments: Sequence[Any], make_tensor: Callable[..., torch.Tensor]
) -> Any:
    """Build described outputs; `make_tensor` is called with shape, dtype and number."""
    kind = description[0]
    if kind == "tensor":
        _, shape, dtype, _, number = description
        return make_tensor(shape, dtype, number)
    if kind in (tuple, list):
        return kind(_rebuild(item, arguments, make_tensor) for item in description[1])
    return arguments[description[1]] if kind == "argument" else description[1]


def _device_of(tensors: Iterable[Any]) -> torch.device:
    return next(t.device for t in tensors if isinstance(t, virtual.VirtualTensor))

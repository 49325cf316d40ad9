"""Memoised blocks: a block is replaced by a stub where an identical block has run.

A decoder of 40 identical layers is recorded by running three of them. A layer runs in full unless a
layer with equal modules, arguments, predecessor and successor has run before::

    embedding  layer 0  layer 1  layer 2  layer 3  ...  layer 38  layer 39  norm
    run        run      run      stub     stub          stub      run       run
               other    model    of layer 1                       other
               before   block                                     successor

A stub allocates the block's outputs under the ids that the block itself would have given them, so
that later blocks free and read the same ids. It allocates nothing else: the allocation trace of a
stubbed block is the trace of its model block (here layer 1), shifted by their distance in blocks.

In training a stub is a node of autograd's graph. Its backward pass allocates the gradients of the
block's arguments. The backward pass runs from the last block to the first, so the allocation
numbers of these gradients are only known later, when the model block has made its own: until then
the gradient of argument `p` has the number ``-1 - p``, a placeholder.
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
    """The blocks run in this pass, by a key of everything that determines their allocations."""

    def __init__(self, model: nn.Module, groups: Sequence[ModuleGroup], log: PassLog) -> None:
        self._log = log
        signatures: list[Any] = []
        for group in groups:
            module = find_submodule(model, group.names[0]) if len(group.names) == 1 else None
            signatures.append(None if module is None else module_signature(module))
        # The successor is part of the signature, since code between the two, such as a norm without
        # parameters, counts for the block, and since the successor runs first in a backward pass.
        self._signatures = [
            None if block is None else (block, successor)
            for block, successor in zip(signatures, [*signatures[1:], None], strict=True)
        ]
        # Without gradients, the layers of a vision tower (all before the last block that returns to
        # an earlier one) run in full, since their outputs are freed together after the last layer.
        # In training autograd keeps the outputs in any case.
        self._last_return = max(
            (index for index, group in enumerate(groups) if group.returns_to is not None), default=0
        )
        self._memo: dict[Any, tuple[int, Any, int]] = {}
        self._model_blocks: list[int] = []
        # For each called block, the storages of its arguments that require gradients.
        self._differentiated: dict[int, set[AllocId]] = {}
        self._frees_distant: dict[tuple[int, int], bool] = {}

    def start(self, model_blocks: list[int]) -> None:
        """Begin a pass; `call` writes each stubbed block's model block into `model_blocks`."""
        self._memo, self._frees_distant, self._model_blocks = {}, {}, model_blocks

    # The memo's key has everything that determines a block's allocations and the ids in its trace:
    #
    #   modules      of the block, its predecessor and its successor
    #   producers    of the arguments of containers, which may live through the block
    #   arguments    shape and dtype; distance of the producer, and the allocation's number there
    #
    # A trace is shifted by whole blocks: if block 2 reads allocation (step, 1, 4), its trace stands
    # for block 7 only if block 7 reads (step, 6, 4). Producers further back than the neighbour are
    # not shifted: both blocks must read the same allocation, such as one mask for all layers.
    def call(
        self, block: int, producers: Any, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Run a block, or only allocate its outputs where an identical block has run.

        `producers` are the `producer_of` the arguments of the block's containers.
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
        # A block that is called twice in a step is not a stub of itself.
        if model_block != block and self._represents_stubs(model_block):
            self._model_blocks[block] = model_block
            result = self._stub(outputs, block, arguments)
            # Glue code after the block numbers its allocations as if the block had run.
            sizes = self._log.traces[block].sizes
            sizes += [0] * (num_allocations - len(sizes))
            return result
        positions = {id(tensor): position for position, tensor in enumerate(arguments)}
        del arguments  # the caller may drop an argument while the block runs
        result = forward(*args, **kwargs)
        outputs = self._describe(result, block, positions)
        # A stub can't repeat writes into shared containers, such as tensors added to a list.
        has_written = any(id(tensor) not in positions for tensor in tensors_in((kwargs, args)))
        if _can_be_stubbed(outputs) and not has_written:
            self._memo[key] = block, outputs, len(self._log.traces[block].sizes)
        return result

    def _represents_stubs(self, model_block: int) -> bool:
        """Return True if a block's trace also holds for its stubs.

        The trace doesn't hold if the block frees storages of distant blocks, whose distance differs
        for each stub. Nor does it hold if an argument that requires a gradient is an argument of
        other blocks too, such as a residual: the block keeps the argument for its backward pass,
        which a stub doesn't, and adds up gradients from blocks at different distances.
        """
        traces, key = self._log.traces, (model_block, len(self._log.traces[model_block].events))
        if key not in self._frees_distant:  # cached, since each of its stubs needs the answer
            self._frees_distant[key] = any(
                freed is not None and freed[0] == self._log.step and abs(model_block - freed[1]) > 1
                for freed in traces[model_block].events
            )
        return not self._frees_distant[key] and not any(
            storage in trace.reads
            for storage in self._differentiated[model_block]
            for block, trace in enumerate(traces)
            if block != model_block
        )

    def _stub(self, outputs: Any, block: int, arguments: list[torch.Tensor]) -> Any:
        """Allocate a block's outputs, and in its backward pass the gradients of its arguments."""
        # The outputs are built twice: first to list their tensors, then from the tensors that the
        # stub has allocated, because an autograd Function returns a flat tuple of tensors.
        wanted_outputs: list[tuple[Any, torch.dtype, int]] = []

        def list_tensor(shape: Any, dtype: torch.dtype, number: int) -> torch.Tensor:
            wanted_outputs.append((shape, dtype, number))
            return torch.empty(0)

        _rebuild(outputs, arguments, list_tensor)
        stub: Any = _Stub
        stub_outputs = iter(stub.apply((self._log, block, wanted_outputs), *arguments))
        return _rebuild(outputs, arguments, lambda *_: next(stub_outputs))

    def _describe(self, tree: Any, block: int, positions: dict[int, int] | None = None) -> Any:
        """Return a hashable description of nested values: shapes, dtypes, `producer_of` tensors.

        `positions` has the position of each argument by its `id`: a tensor found there is described
        as an argument of the block.
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
#   block 1, recorded   free (s, 2, -1)            frees the gradient that block 2 has made
#                       dx = (s, 1, 9)             a hook notes: argument 0 of block 1, number 9
#   after the pass      free (s, 2, 9)             -1 replaced by 9, as if block 2 had run
class _Stub(torch.autograd.Function):
    """Autograd function that allocates a block's outputs and gradients without computing them."""

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
    """Return the placeholder number for an argument's position, or the position for a number."""
    return -1 - position


def module_signature(module: nn.Module) -> Any:
    """Return a hashable description of a module, without its weights' values and layer number."""
    settings: list[tuple[str, Any]] = []
    for name, value in sorted(vars(module).items()):
        if name in _NOT_COMPARED or any(part in name for part in _LAYER_NUMBERS):
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
_LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx")


def producer_of(block: int, storage: AllocId | None) -> Any:
    """Return the distance to the block that made a storage; beyond 1, (block, allocation number).

    None for a storage that no recorded step has allocated.
    """
    if storage is None:
        return None
    return block - storage[1] if block - storage[1] < 2 else storage[1:]


def _can_be_stubbed(description: Any) -> bool:
    """Return True if every output is the block's own tensor, an argument or a plain value."""
    kind = description[0]
    if kind == "tensor":
        return bool(description[3] == 0)
    if kind in (tuple, list):
        return all(_can_be_stubbed(item) for item in description[1])
    return kind in ("argument", "value")


def _rebuild(
    description: Any, arguments: Sequence[Any], make_tensor: Callable[..., torch.Tensor]
) -> Any:
    """Build outputs from their description; `make_tensor` gets shape, dtype, allocation number."""
    kind = description[0]
    if kind == "tensor":
        _, shape, dtype, _, number = description
        return make_tensor(shape, dtype, number)
    if kind in (tuple, list):
        return kind(_rebuild(item, arguments, make_tensor) for item in description[1])
    return arguments[description[1]] if kind == "argument" else description[1]


def _device_of(tensors: Iterable[Any]) -> torch.device:
    """Return the device of the first virtual tensor."""
    return next(t.device for t in tensors if isinstance(t, virtual.VirtualTensor))

"""Recorder: the allocation traces of a step, or of both passes of a training micro-batch.

Every event is attributed to a block. In a forward pass, module calls say which block runs. A
backward pass has no module calls, but every operation there belongs to a node of autograd's graph,
and nodes are numbered in the order in which the forward pass created them::

    block            0         1         2
    node numbers     0 ... 6   7 ... 19  20 ...       node 12 runs: block 1

So a node's number tells its block. Nodes of a recomputed layer (gradient checkpointing) are created
during the backward pass, and count for the block that runs. Allocation numbers of a block continue
from its forward trace into its backward trace: each is unique within a micro-batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from duoka import virtual
from duoka.base.text import containing
from duoka.models.chunked_loss import chunked_head
from duoka.runtime.dispatch.arguments import bring, caches_in, caches_of, mapped_call, tensors_in

from .blocks import ModuleGroup
from .boundaries import Moves, observe_calls, replace_calls
from .memo import BlockMemo, placeholder, producer_of
from .op_costs import count_bytes, count_flops, count_host_work, count_launches, find_kind
from .recorded import AllocId, PassLog, RecordedMicroBatch, RecordedPass, RecordedTrace


class ChunkBytes(int):
    """Bytes of an allocation in one chunk of the loss, of `loss_chunk_tokens` tokens."""


class _Argument(NamedTuple):
    """A tensor argument of a module call: its Python `id`, its storage and its bytes.

    `storage` is None for a tensor that no recorded step has allocated, such as a model input.
    """

    tensor_id: int
    storage: AllocId | None
    num_bytes: int


class Recorder:
    """Listener of a virtual GPU that records the passes of a model block by block.

    The whole model is on one virtual GPU without data. `groups` are its blocks in execution order;
    a last group without modules stands for the caller, which uses the outputs. With `skip`,
    identical blocks run once (`memo`). `hears_moves` records explicit moves in model code
    (``x.to(y.device)``) as moves; it is implied where a group `returns_to` an earlier block. A
    tensor moved back to an earlier block, and all operations on this tensor there, are recorded in
    the group that returns to that block.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Sequence[ModuleGroup],
        *,
        skip: bool = True,
        hears_moves: bool = False,
    ) -> None:
        self._model, self._groups = model, groups
        self._log = PassLog()
        self._memo = BlockMemo(model, groups, self._log) if skip else None
        has_returns = any(group.returns_to is not None for group in groups)
        self._hears_moves = hears_moves or has_returns
        # A block of parameters alone is never called: it begins when its container is entered.
        modules = {name for name, _ in model.named_modules()}
        self._is_called = [not modules.isdisjoint(group.names) for group in groups]
        owners = {owner: index for index, group in enumerate(groups) for owner in group.owners}
        self._block_of: dict[int, int] = {}
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                self._block_of.setdefault(id(parameter), owners.get(name, 0))
        self._slots: list[list[int]] = [[] for _ in groups]
        self._current = 0
        self._is_few = False
        self._scope = ExitStack()
        # Arguments of entered containers, until the next block call; (block, argument) pairs read.
        self._entered: list[_Argument] = []
        self._moved: set[tuple[int, _Argument]] = set()
        self.counts_work = True
        """Set to False while operations count for their allocations, and not for their work."""
        self.needs_movers = False
        """True once model code has passed to a module a tensor that it created on the host."""
        self.recomputes = False
        """True once a module was called during a backward pass (gradient checkpointing)."""
        self._is_backward = False
        # The index of the running loss chunk, or None outside of chunks. Only chunk 0 is recorded:
        # the other chunks repeat its allocations.
        self._chunk: int | None = None
        # The number of each block's first allocation in this pass: 0 in a forward pass; 12 in the
        # backward pass of a block whose forward pass made 12 allocations. A free of number 7 in
        # that backward pass then means a tensor saved by the forward pass.
        self._first_numbers = [0] * len(groups)
        # The autograd node numbers at which block calls begin, and the block of each call.
        self._first_nodes: list[int] = []
        self._node_blocks: list[int] = []
        # Allocation numbers of argument gradients, by block and position of the argument.
        self._gradients: dict[tuple[int, int], int] = {}

    def __enter__(self) -> Self:
        chunked = chunked_head(self._model)
        if chunked is not None:
            chunked.chunk_begins = partial(setattr, self, "_chunk")
            self._scope.callback(setattr, chunked, "chunk_begins", None)
        first_blocks: dict[str, int] = {}
        for index, group in enumerate(self._groups):
            for name in group.names:
                for container in containing(name):
                    first_blocks.setdefault(container, index)
        enter = {
            name: partial(self._enter_container, first_blocks[name], caches_of(module))
            for name, module in self._model.named_modules()
            if name in first_blocks
        }
        leave = {} if self._groups[-1].names else {"": self._leave_model}
        blocks = {
            name: partial(self._call_block, index)
            for index, group in enumerate(self._groups)
            for name in group.names
        }
        self._scope.enter_context(observe_calls(self._model, enter, leave))
        self._scope.enter_context(replace_calls(self._model, blocks))
        return self

    def __exit__(self, *_: object) -> None:
        self._scope.close()

    def record(self, run: Callable[[], None], *, is_few: bool = False) -> RecordedPass:
        """Record a step of a single pass; `is_few` is explained at `count_bytes`."""
        self._is_few = is_few
        self._start_step()
        recorded = self._record_pass(run)
        self._note_retained()
        return recorded

    def record_training(self, forward: Callable[[], torch.Tensor]) -> RecordedMicroBatch:
        """Record a micro-batch: run `forward`, which returns the loss, and then backward."""
        self._start_step()
        losses: list[torch.Tensor] = []
        first_pass = self._record_pass(lambda: losses.append(forward()))
        # The caller starts the backward pass with the loss: the loss is no live-through read.
        first_pass.traces[-1].live_through -= {self._log.id_of(loss) for loss in losses}
        self._first_numbers = [len(trace.sizes) for trace in first_pass.traces]

        def backward() -> None:
            self._current = len(self._groups) - 1
            losses.pop().backward()

        # Hooks of the forward pass note the reads of gradients; see `_follow_gradient`.
        self._is_backward = True
        with register_module_forward_pre_hook(self._note_call):
            second_pass = self._record_pass(backward)
        self._note_retained()
        self._is_backward = False
        second_pass.model_blocks = first_pass.model_blocks
        self._resolve_placeholders(second_pass)
        _drop_frees_of_saved(first_pass, second_pass)
        return RecordedMicroBatch(first_pass, second_pass)

    def begin_sampling(self) -> None:
        """Note that operations belong to the sampling of tokens from now on, which isn't work."""
        self.counts_work = False
        trace = self._log.traces[self._current]
        trace.sampling_at = len(trace.events)

    def forget(self) -> None:
        """Forget the caches and gradients recorded so far: the next step starts without any."""
        self._log.ids.clear()
        self._slots = [[] for _ in self._groups]

    def _start_step(self) -> None:
        """Start the next step, with the allocation numbers of a forward pass."""
        self._log.step += 1
        self._first_numbers = [0] * len(self._groups)
        self._first_nodes, self._node_blocks, self._gradients = [0], [0], {}

    def _record_pass(self, run: Callable[[], None]) -> RecordedPass:
        """Call `run` while listening to the virtual GPU, and return the trace of each block."""
        self._current = 0
        self._entered, self._moved = [], set()
        self._log.traces = traces = [RecordedTrace() for _ in self._groups]
        for trace, slots in zip(traces, self._slots, strict=True):
            trace.slots = {self._log.ids[storage]: slot for slot, storage in enumerate(slots)}
        model_blocks = list(range(len(self._groups)))
        if self._memo is not None:
            self._memo.start(model_blocks)
        with ExitStack() as scope:
            if self._hears_moves:
                scope.enter_context(Moves(self._block_that_made, self._note_move))
            scope.enter_context(virtual.observe(self))
            run()
        return RecordedPass(traces=traces, model_blocks=model_blocks, step=self._log.step)

    def _note_retained(self) -> None:
        """Mark the last pass's allocations that are still live (caches, gradients) as retained.

        Gradients of stubs, which have placeholder numbers below 0, are left out.
        """
        # Slots are in order of allocation. A layer with keys in slot 0 and values in slot 1
        # allocates longer tensors, and frees both slots; the new keys and values are 0 and 1 again.
        self._slots = [[s for s in slots if s in self._log.ids] for slots in self._slots]
        for storage_id, storage in sorted(self._log.ids.items(), key=lambda item: item[1]):
            step, block, number = storage
            start, trace = self._first_numbers[block], self._log.traces[block]
            if step == self._log.step and start <= number < start + len(trace.sizes):
                self._slots[block].append(storage_id)
                trace.retained += (number,)

    # The listener interface of virtual GPUs.

    def allocated(self, gpu: object, storage_id: int, num_bytes: int) -> None:
        """Add an allocation to the trace of the current block."""
        # Loss chunks run one after another, none is larger than chunk 0, and each frees its own
        # allocations. Storages of the other chunks get no id, so `freed` ignores them.
        if self._chunk:
            return
        if self._chunk == 0:
            num_bytes = ChunkBytes(num_bytes)
        self._locate()
        block, trace = self._current, self._log.traces[self._current]
        number = self._first_numbers[block] + len(trace.sizes)
        self._log.ids[storage_id] = self._log.step, block, number
        trace.sizes.append(num_bytes)
        trace.events.append(None)

    def freed(self, gpu: object, storage_id: int) -> None:
        """Add a free to the trace of the current block; a cache is freed in its own block's."""
        self._locate()
        storage = self._log.ids.pop(storage_id, None)
        if storage is not None:
            # A storage of an earlier step is a cache, whichever block runs when it is freed.
            block = self._current if storage[0] == self._log.step else storage[1]
            self._log.traces[block].events.append(storage)

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add the FLOPs, memory traffic and kernel launch of an operation to the current block."""
        self._locate()
        trace = self._log.traces[self._current]
        if trace.matmul_at is None and virtual.is_product(func, args):
            trace.matmul_at = len(trace.events)
        if not self.counts_work or find_kind(func) == "view":
            return
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        if number := count_launches(func, inputs, outputs, is_few=self._is_few):
            trace.launches += number
            trace.moved_bytes += count_bytes(func, inputs, outputs, is_few=self._is_few)
        trace.flops += count_flops(func, args, kwargs, result)
        trace.add_host_work(*count_host_work(func, args, is_few=self._is_few))

    def _locate(self) -> None:
        """In a backward pass, set the current block by the running autograd node."""
        if not self._is_backward:
            return
        # With block 1's nodes from 7 on and block 2's from 20 on, node 12 belongs to block 1. Two
        # kinds of nodes have numbers outside of these ranges:
        #
        #   AccumulateGrad     has the largest number, so that autograd runs it at once; its
        #                      parameter tells the block
        #   recomputed nodes   a checkpointed layer's nodes are created during the backward pass,
        #                      with larger numbers than all others; the current block stays
        #
        # Autograd runs nodes in descending order of their numbers, so the block never increases.
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return
        if type(node).__name__ == "AccumulateGrad":
            block = self._block_of.get(id(node.variable), self._current)
        else:
            block = self._node_blocks[bisect_right(self._first_nodes, node._sequence_nr()) - 1]
        self._current = min(self._current, block)

    # Observers of module calls.

    def _begin(self, block: int) -> bool:
        """Make a block the current one; in a backward pass (recomputation) only return False."""
        if self._is_backward:
            return False
        self._first_nodes.append(torch._C._autograd._get_sequence_nr())
        self._node_blocks.append(block)
        self._current = block
        return True

    def _enter_container(
        self,
        first_block: int,
        caches: frozenset[int | str],
        module: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, Any]:
        """Bring the arguments of a container to its first block's device, as dispatch does."""
        tensors: list[torch.Tensor] = []

        def bring_tensor(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(self._bring(tensor))
            return tensors[-1]

        brought = mapped_call(args, kwargs, bring_tensor, caches)
        if not self._is_called[first_block] and self._begin(first_block):
            self._read(first_block, [*self._arguments(tensors)])
        if not self._is_backward:
            for tensor in tensors:
                self._follow_gradient(tensor, None, by=first_block)
            # Arguments from other devices are live-through reads of the block that is called next.
            # Example: a decoder is given the encoder's output. The decoder's first block, the
            # embedding, doesn't read it, but dispatch copies it there, and from there to layers.
            self._entered += (
                argument
                for argument in self._describe(tensors)
                if argument.storage is None or first_block not in self._places(argument.storage[1])
            )
        return brought

    def _call_block(
        self, block: int, forward: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> Any:
        """Note the arguments of a block's module, then run the module or its stub."""
        if not self._begin(block):
            return forward(*args, **kwargs)
        args, kwargs = mapped_call(args, kwargs, self._bring)
        entered, self._entered = self._entered, []
        self._read(block, entered, live_through=True)
        self._read(block, [*self._arguments(tensors_in((kwargs, args)))])
        if self._memo is None:
            return forward(*args, **kwargs)
        producers = tuple(producer_of(block, argument.storage) for argument in entered)
        return self._memo.call(block, producers, forward, args, kwargs)

    def _leave_model(self, model: nn.Module, args: Any, output: Any) -> None:
        """Note the model's outputs as reads of the caller, to whose device dispatch copies them."""
        caller = len(self._groups) - 1
        self._begin(caller)
        caches = {id(tensor) for tensor in tensors_in(caches_in(output))}
        returned = [tensor for tensor in tensors_in(output) if id(tensor) not in caches]
        self._read(caller, [*self._arguments(returned)], live_through=True)

    def _note_call(self, module: nn.Module, args: Any) -> None:
        """Note a module call during a backward pass."""
        self.recomputes = True

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor, copied to the virtual GPU where dispatch would copy it from the host."""
        brought = bring(tensor, virtual.virtual_device(0))
        self.needs_movers |= brought is not tensor
        return brought

    def _places(self, block: int) -> tuple[int, int | None]:
        """Return a block and the earlier block whose device it shares, or None if there is none."""
        return block, self._groups[block].returns_to

    def _describe(self, tensors: Iterable[Any]) -> Iterator[_Argument]:
        """Yield an `_Argument` for each virtual tensor."""
        for tensor in tensors:
            if isinstance(tensor, virtual.VirtualTensor):
                yield _Argument(id(tensor), self._log.id_of(tensor), tensor.nbytes)

    def _arguments(self, tensors: Iterable[torch.Tensor]) -> Iterator[_Argument]:
        """Yield an `_Argument` for each argument of a block, and follow its gradient."""
        for position, tensor in enumerate(tensors):
            self._follow_gradient(tensor, position)
            yield from self._describe([tensor])

    def _read(
        self, block: int, arguments: Iterable[_Argument], *, live_through: bool = False
    ) -> None:
        """Add arguments made by other blocks to a block's reads.

        `live_through` is for arguments of the block's containers, not of the block itself.
        """
        trace = self._log.traces[block]
        for argument in arguments:
            storage = argument.storage
            if storage is None or storage[1] == block:
                continue
            # A storage lives through the block unless the block itself is given a tensor on it.
            if not live_through:
                trace.live_through.discard(storage)
            elif storage not in trace.reads:
                trace.live_through.add(storage)
            # Movers copy each tensor object once per block: two views of one storage count twice,
            # and a mask that is passed to two modules of the block counts once.
            if (block, argument) not in self._moved:
                self._moved.add((block, argument))
                trace.reads[storage] = trace.reads.get(storage, 0) + argument.num_bytes

    # Listeners of explicit moves in model code.

    def _block_that_made(self, tensor: torch.Tensor) -> int | None:
        """Return the block that allocated a tensor in this step; None for any other tensor."""
        storage = self._log.id_of(tensor)
        return storage[1] if storage is not None and storage[0] == self._log.step else None

    def _note_move(self, result: torch.Tensor, source: torch.Tensor, block: int) -> torch.Tensor:
        """Note an explicit move to the device of a block, and return the moved tensor."""
        self._follow_gradient(source, None)
        made_by = self._block_that_made(source)
        group = self._return_to(block)
        if made_by is not None and block == self._current and made_by not in self._places(block):
            # A move forward, to the device of the running block: like a copy made by dispatch.
            self._read(block, [*self._arguments([source])])
        if made_by is None or made_by <= block or group is None:
            return result
        self._begin(group)
        # A move back. On several GPUs the result is a copy: clone, so that the source can be freed.
        return result.clone() if result is source else result

    def _return_to(self, block: int) -> int | None:
        """Return the next group that returns to a block; None if a called block comes before it."""
        for index, group in enumerate(self._groups[self._current :], self._current):
            if group.returns_to == block:
                return index
            if index > self._current and self._is_called[index]:
                return None
        return None

    # Gradients of arguments, in a backward pass.

    def _follow_gradient(self, tensor: Any, position: int | None, *, by: int | None = None) -> None:
        """Register a hook that notes when an argument's producer reads the argument's gradient.

        Block 1 gives `x` to block 3. In the backward pass block 3 makes `dx`, the gradient of `x`,
        and nodes of block 1 read it, together with tensors that block 1 has saved in the forward
        pass. A hook on `x` gets `dx`, whose storage tells the block that made `dx`::

            forward:   1 -- x --> 3        traces[3].reads has x
            backward:  1 <- dx -- 3        traces[1].reads gets dx

        Where a container that begins with block 2 was given `x`, dispatch has copied `x` to block 2
        first, and the gradient goes back `by` way of block 2, which reads `dx` as well. `position`
        is the argument's index among the block's; None for containers and explicit moves.
        """
        storage = self._log.id_of(tensor) if tensor.requires_grad else None
        if storage is None:
            return
        producer = storage[1]

        # When the hook runs, `self._log` has the traces of the backward pass. There the roles are
        # exchanged: block 3 is the maker, block 1 the reader. On several GPUs autograd moves the
        # gradient, in the backward function of the copy of `x` that a mover has made for block 3.
        # A gradient made by block 1 itself isn't moved; one of another step is not noted.
        def note_read(gradient: Any) -> None:
            origin = self._log.id_of(gradient)
            if origin is None or origin[1] == producer or origin[0] != self._log.step:
                return
            traces, num_bytes = self._log.traces, gradient.nbytes
            traces[producer].reads[origin] = num_bytes
            if by is not None and producer < by < origin[1]:
                traces[by].reads[origin] = num_bytes
            if position is not None:
                self._gradients[origin[1], position] = origin[2]

        tensor.register_hook(note_read)

    def _resolve_placeholders(self, backward: RecordedPass) -> None:
        """Replace placeholder numbers of stubs' gradients by the numbers of the recorded block."""

        def resolved(storage: AllocId) -> AllocId:
            step, block, number = storage
            if number >= 0 or step != self._log.step:
                return storage
            return step, block, self._gradients[backward.model_blocks[block], placeholder(number)]

        for block, trace in enumerate(backward.traces):
            if backward.model_blocks[block] == block:
                trace.events = [None if it is None else resolved(it) for it in trace.events]
                trace.reads = {resolved(it): size for it, size in trace.reads.items()}


def _drop_frees_of_saved(forward: RecordedPass, backward: RecordedPass) -> None:
    """Remove the frees of arguments that stubbed blocks would have saved, from a forward pass.

    A stub saves nothing for its backward pass, so its arguments are freed in the forward pass
    already. Example: block 5 is a stub of block 3. The backward trace of block 3 frees allocation n
    of block 2, its saved argument; so block 5 would have saved allocation n of block 4, whose free
    is removed here from the forward pass.
    """
    saved = {
        (step, producer + block - model, number)
        for block, model in enumerate(forward.model_blocks)
        if block != model
        for step, producer, number in filter(None, backward.traces[model].events)
        if 0 <= producer < model
    }
    for trace in forward.traces:
        if trace.matmul_at is not None:
            trace.matmul_at -= sum(event in saved for event in trace.events[: trace.matmul_at])
        trace.events = [event for event in trace.events if event not in saved]

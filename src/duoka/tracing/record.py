"""Recording: what one step allocates, frees, computes and passes on, block by block.

Blocks that are alike (same modules, same arguments, same predecessor) are run once: a later one
is replaced by a call that only makes its outputs. What such a block does is known from the first.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from duoka import virtual
from duoka.base.text import containing
from duoka.models.quantization import parts
from duoka.runtime.dispatch.arguments import bring, caches_in, caches_of, mapped_call, tensors_in

from .blocks import ModuleGroup
from .op_costs import count_bytes, count_flops, launches

Home = tuple[int, int, int]
"""Where a storage was made: the pass, the block, the number of the allocation in it."""


@dataclass(slots=True)
class RawTape:
    """One pass through one block, with sizes as numbers and homes as references."""

    sizes: list[int] = field(default_factory=list)
    events: list[Home | None] = field(default_factory=list)
    reads: dict[Home, int] = field(default_factory=dict)
    passing: set[Home] = field(default_factory=set)
    retained: tuple[int, ...] = ()
    slots: dict[Home, int] = field(default_factory=dict)
    matmul_at: int | None = None
    flops: int = 0
    moved_bytes: int = 0
    launches: int = 0


@dataclass(slots=True)
class RecordedPass:
    """One step: a tape for each block that ran, and for each that didn't, the one like it."""

    tapes: list[RawTape]
    like: list[int]
    number: int

    def is_like(self, other: RecordedPass) -> bool:
        """Whether as much happens in both: where that grows with them, long ones take minutes."""
        pairs = zip(self.tapes, other.tapes, strict=True)
        return all(len(tape.events) == len(same.events) for tape, same in pairs)


class _Argument(NamedTuple):
    """A tensor among the arguments of a call; not itself, which would keep it alive."""

    tensor_id: int
    home: Home | None
    num_bytes: int


class Recorder:
    """A listener that sorts events into blocks; with `skip` alike blocks are run once.

    The model is whole on one virtual GPU without data. Its groups are in execution order; one
    without modules at the end stands for what the caller does with the outputs.
    """

    def __init__(self, model: nn.Module, groups: Sequence[ModuleGroup], *, skip: bool) -> None:
        self._model = model
        self._groups = groups
        self._homes: dict[int, Home] = {}
        self._slots: list[list[int]] = [[] for _ in groups]
        # A parameter that is a block by itself is never called: it begins with what contains it.
        modules = {name for name, _ in model.named_modules()}
        self._is_called = [not modules.isdisjoint(group.names) for group in groups]
        self._current = 0
        self._number = -1
        self._alone = False
        # What is done for the sake of its memory alone is no work.
        self.counts_work = True
        self._tapes: list[RawTape] = []
        self._skipper = Skipper(model, groups) if skip else None
        self._patched: list[tuple[nn.Module, Any]] = []
        self._handles: list[RemovableHandle] = []
        self._entered: list[_Argument] = []
        self._moved: set[tuple[int, _Argument]] = set()
        # By block and number of events: all that are like a block ask again.
        self._frees_afar: dict[tuple[int, int], bool] = {}
        # Whether model code gives blocks what it has made on the host.
        self.needs_movers = False

    def __enter__(self) -> Self:
        if not self._groups[-1].names:
            self._handles.append(self._model.register_forward_hook(self._leave))
        containers: dict[str, int] = {}
        for index, group in enumerate(self._groups):
            for name in group.names:
                for container in containing(name):
                    containers.setdefault(container, index)
        for name, module in self._model.named_modules():
            if name in containers:
                enter = partial(self._enter_container, containers[name], caches_of(module))
                handle = module.register_forward_pre_hook(enter, with_kwargs=True)
                self._handles.append(handle)
        for index, group in enumerate(self._groups):
            for name in group.names:
                module = _submodule(self._model, name)
                if module is not None:
                    self._patch(module, index)
        return self

    def __exit__(self, *_: object) -> None:
        for module, forward in self._patched:
            if forward is None:
                del module.forward
            else:
                module.forward = forward
        self._patched.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def record(self, step: Callable[[], None], *, alone: bool = False) -> RecordedPass:
        """Run one step and return what it did; `alone` if that is one token of one sequence."""
        self._alone = alone
        self._number += 1
        self._current = 0
        self._entered = []
        self._moved = set()
        self._frees_afar = {}
        self._tapes = [RawTape() for _ in self._groups]
        for block, slots in enumerate(self._slots):
            self._tapes[block].slots = {self._homes[s]: i for i, s in enumerate(slots)}
        like = list(range(len(self._groups)))
        if self._skipper is not None:
            self._skipper.start(like)
        with virtual.observe(self):
            step()
        self._keep()
        return RecordedPass(tapes=self._tapes, like=like, number=self._number)

    def forget(self) -> None:
        """Start a new sequence: what the last one kept doesn't count."""
        self._homes.clear()
        self._slots = [[] for _ in self._groups]

    def allocated(self, gpu: object, storage_id: int, num_bytes: int) -> None:
        """Put an allocation on the tape of the block that runs."""
        tape = self._tapes[self._current]
        self._homes[storage_id] = (self._number, self._current, len(tape.sizes))
        tape.sizes.append(num_bytes)
        tape.events.append(None)

    def freed(self, gpu: object, storage_id: int) -> None:
        """Put a free on the tape of the block that runs, or whose cache it was."""
        home = self._homes.pop(storage_id, None)
        if home is None:
            return
        number, block, _ = home
        if number == self._number:
            self._tapes[self._current].events.append(home)
        else:
            # A cache entry ends where it was made, even if another block's turn has come.
            self._tapes[block].events.append(home)

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Add an operation's arithmetic, memory traffic and launch to the block that runs."""
        tape = self._tapes[self._current]
        if tape.matmul_at is None and virtual.is_product(func, args):
            tape.matmul_at = len(tape.events)
        if not self.counts_work:
            return
        tape.flops += count_flops(func, args, kwargs, result)
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        if launches(func, inputs, outputs):
            tape.launches += 1
            tape.moved_bytes += count_bytes(func, inputs, outputs, alone=self._alone)

    def _keep(self) -> None:
        """What is alive after a step outlives it: caches."""
        number = self._number
        for block, slots in enumerate(self._slots):
            self._slots[block] = [s for s in slots if s in self._homes]
        for storage, home in sorted(self._homes.items(), key=lambda item: item[1]):
            if home[0] == number and self._outlives(home):
                self._slots[home[1]].append(storage)
                self._tapes[home[1]].retained += (home[2],)

    def _outlives(self, home: Home) -> bool:
        """Whether what is alive after a step is one of its tape's allocations: no stand-in's."""
        return home[2] < len(self._tapes[home[1]].sizes)

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        """What follows is the caller's, to whose device dispatch brings what is returned."""
        self._current = len(self._groups) - 1
        caches = {id(tensor) for tensor in tensors_in(caches_in(output))}
        returned = [tensor for tensor in tensors_in(output) if id(tensor) not in caches]
        self._read(self._current, [*self._arguments(returned)], passing=True)

    def _enter_container(
        self, first: int, caches: frozenset[int | str], module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """What contains blocks begins: dispatch moves its arguments to its first block."""
        tensors: list[torch.Tensor] = []

        def change(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(self._bring(tensor))
            return tensors[-1]

        brought = mapped_call(args, kwargs, change, caches)
        if not self._is_called[first] and self._begin(first):
            self._read(first, [*self._arguments(tensors)])
        self._enter(first, tensors)
        return brought

    def _enter(self, first: int, tensors: Sequence[torch.Tensor]) -> None:
        """Note what is moved to a block for those behind it, too."""
        self._entered += self._moved_to(first, self._arguments(tensors))

    def _bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """What dispatch would bring from the host, on the virtual GPU; all else is there."""
        brought = bring(tensor, virtual.virtual_device(0))
        self.needs_movers |= brought is not tensor
        return brought

    def _moved_to(self, first: int, arguments: Iterable[_Argument]) -> Iterator[_Argument]:
        """Yield what isn't on a block's device already.

        That block may have run before, as an embedding does whose result a tower's features join:
        what was made there since, or was moved back there, stays.
        """
        for argument in arguments:
            if argument.home is None or first not in self._places(argument.home[1]):
                yield argument

    def _places(self, block: int) -> tuple[int, int | None]:
        """The blocks on whose device lies what a block makes."""
        return block, self._groups[block].returns_to

    def _patch(self, module: nn.Module, block: int) -> None:
        forward = module.forward

        @wraps(forward)  # whose signature says what it takes
        def recorded(*args: Any, **kwargs: Any) -> Any:
            if not self._begin(block):
                return forward(*args, **kwargs)
            args, kwargs = mapped_call(args, kwargs, self._bring)
            entered, self._entered = self._entered, []
            self._read(block, entered, passing=True)
            self._read(block, [*self._arguments(tensors_in((kwargs, args)))])
            if self._skipper is None:
                return forward(*args, **kwargs)
            around = tuple(_seen_from(block, argument.home) for argument in entered)
            return self._skipper.call(self, (block, around), forward, args, kwargs)

        self._patched.append((module, vars(module).get("forward")))
        module.forward = recorded

    def _begin(self, block: int) -> bool:
        """Let a block begin; whether its call is of interest."""
        self._current = block
        return True

    def _arguments(self, tensors: Iterable[torch.Tensor]) -> Iterator[_Argument]:
        for tensor in tensors:
            if isinstance(tensor, virtual.VirtualTensor):
                yield _Argument(id(tensor), self._homes.get(tensor.storage_id), tensor.nbytes)

    def _read(self, block: int, arguments: Sequence[_Argument], *, passing: bool = False) -> None:
        """Note what is moved to a block; `passing` if only what contains it was given that."""
        tape = self._tapes[block]
        for argument in arguments:
            home = argument.home
            if home is None or home[1] == block:
                continue
            if not passing:
                tape.passing.discard(home)
            elif home not in tape.reads:
                tape.passing.add(home)
            if (block, argument) not in self._moved:
                self._moved.add((block, argument))
                tape.reads[home] = tape.reads.get(home, 0) + argument.num_bytes

    def adopt(self, tensor: virtual.VirtualTensor, block: int, index: int) -> None:
        """Count a stand-in's output as what the block that it stands for would have made."""
        self._homes[tensor.storage_id] = (self._number, block, index)

    def count_of(self, block: int) -> int:
        """How many allocations a block's tape has so far."""
        return len(self._tapes[block].sizes)

    def count_from(self, block: int, count: int) -> None:
        """Number what comes behind a stand-in as behind the call that it stands for."""
        sizes = self._tapes[block].sizes
        sizes += [0] * (count - len(sizes))

    def frees_afar(self, block: int) -> bool:
        """Whether a block's tape has frees of what was made in this pass and not next to it."""
        events = self._tapes[block].events
        key = (block, len(events))
        if key not in self._frees_afar:
            self._frees_afar[key] = any(
                home is not None and home[0] == self._number and abs(block - home[1]) > 1
                for home in events
            )
        return self._frees_afar[key]

    def gives_others(self, block: int, home: Home) -> bool:
        """Whether what a block was given has been given to another one in this pass, too."""
        return any(home in tape.reads for by, tape in enumerate(self._tapes) if by != block)

    def home_of(self, tensor: virtual.VirtualTensor) -> Home | None:
        """Where a tensor's storage was made."""
        return self._homes.get(tensor.storage_id)


class Skipper:
    """Recognises blocks that would do what an earlier one did, and stands in for them."""

    def __init__(self, model: nn.Module, groups: Sequence[ModuleGroup]) -> None:
        alone: list[Any] = []
        for group in groups:
            module = _submodule(model, group.names[0]) if len(group.names) == 1 else None
            alone.append(None if module is None else signature(module))
        # What comes between a block's call and the next one, such as a norm without parameters, is
        # done in its turn. In the backward pass the block after one comes before it.
        self._signatures = [
            None if block is None else (block, following)
            for block, following in zip(alone, [*alone[1:], None], strict=True)
        ]
        self._seen: dict[Any, tuple[int, Any, int]] = {}
        self._like: list[int] = []

    def start(self, like: list[int]) -> None:
        """Begin a step; `like` is filled with the blocks that were run for others."""
        self._seen = {}
        self._like = like

    def call(
        self,
        recorder: Recorder,
        place: tuple[int, Any],
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Run a block, or make its outputs only where one that is like it has run."""
        block, around = place
        signature = self._signatures[block]
        if signature is None or block == 0:
            return forward(*args, **kwargs)
        inputs = _describe((args, kwargs), recorder, block, {})
        key = (signature, self._signatures[block - 1], around, inputs)
        first, output, count = self._seen.get(key, (block, None, 0))
        # A block that runs twice in a step is no stand-in for itself.
        if first != block and self.speaks_for_others(recorder, first):
            self._like[block] = first
            result = self.stand_in(output, recorder, block, (kwargs, args))
            recorder.count_from(block, count)
            return result
        arguments = {
            id(tensor): position for position, tensor in enumerate(tensors_in((kwargs, args)))
        }
        result = forward(*args, **kwargs)
        output = _describe(result, recorder, block, arguments)
        # A stand-in doesn't write into what blocks share.
        has_written = any(id(tensor) not in arguments for tensor in tensors_in((kwargs, args)))
        if _can_stand_in(output) and not has_written:
            self._seen[key] = (block, output, recorder.count_of(block))
        return result

    def speaks_for_others(self, recorder: Recorder, first: int) -> bool:
        """Whether what a block does tells what others do that are like it.

        One that ends what was made far away can't say what another one ends.
        """
        return not recorder.frees_afar(first)

    def stand_in(self, picture: Any, recorder: Recorder, block: int, call: Any) -> Any:
        """Make a block's outputs, by the picture of those of the one that it is like."""

        def make(shape: Any, dtype: torch.dtype, index: int) -> torch.Tensor:
            tensor = torch.empty(shape, dtype=dtype, device=device_of(tensors_in(call)))
            assert isinstance(tensor, virtual.VirtualTensor)
            recorder.adopt(tensor, block, index)
            return tensor

        return picture_made(picture, call, make)


def signature(module: nn.Module) -> Any:
    """What a module does, but for its weights and its number: hashable."""
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
    children = tuple((name, signature(child)) for name, child in module.named_children())
    return (type(module), tuple(settings), tensors, children)


_NOT_COMPARED = frozenset({"_parameters", "_buffers", "_modules", "forward"})
_NUMBERS = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx")


def _describe(tree: Any, recorder: Recorder, block: int, arguments: dict[int, int]) -> Any:
    """A hashable picture of nested values: shapes, types and how far back tensors were made."""
    if isinstance(tree, virtual.VirtualTensor):
        if id(tree) in arguments:
            return ("argument", arguments[id(tree)])
        home = recorder.home_of(tree)
        age = _seen_from(block, home)
        index = None if home is None else home[2]
        return ("tensor", tuple(tree.shape), tree.dtype, age, index)
    if isinstance(tree, torch.Tensor):
        return ("cpu", tuple(tree.shape), tree.dtype)
    if type(tree) in (tuple, list):
        return (type(tree), tuple(_describe(item, recorder, block, arguments) for item in tree))
    if type(tree) is dict or isinstance(tree, UserDict):
        return (
            dict,
            tuple((k, _describe(v, recorder, block, arguments)) for k, v in tree.items()),
        )
    if tree is None or isinstance(tree, (str, int, float, bool)):
        return ("value", tree)
    return ("object", id(tree))


def _seen_from(block: int, home: Home | None) -> Any:
    """How far back something was made, or by whom when that is far."""
    if home is None:
        return None
    return block - home[1] if block - home[1] < 2 else home[1:]


def _can_stand_in(picture: Any) -> bool:
    kind = picture[0]
    if kind == "tensor":
        return bool(picture[3] == 0)
    if kind in (tuple, list):
        return all(_can_stand_in(item) for item in picture[1])
    return kind in ("argument", "value")


def picture_made(picture: Any, call: Any, make: Callable[..., torch.Tensor]) -> Any:
    """What a picture shows, its tensors made by `make` from their shape, dtype and number."""
    kind = picture[0]
    if kind == "tensor":
        _, shape, dtype, _, index = picture
        return make(shape, dtype, index)
    if kind in (tuple, list):
        return kind(picture_made(item, call, make) for item in picture[1])
    if kind == "argument":
        return tensors_in(call)[picture[1]]
    return picture[1]


def device_of(arguments: Iterable[Any]) -> torch.device:
    """The virtual GPU of a block's arguments."""
    return next(t.device for t in arguments if isinstance(t, virtual.VirtualTensor))


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    """The module of that name; None when the name is a parameter's."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def homes_in(raw: RawTape) -> Iterator[Home]:
    """All references of a tape."""
    yield from (home for home in raw.events if home is not None)
    yield from raw.reads

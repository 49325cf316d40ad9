"""The route of a call: its stages, and the tensors that cross between them.

A route is found by running the model once, without data, on one virtual GPU, and tracking the stage
that owns each tensor. The outputs of a block belong to its stage, and so do results computed from
them. If a block of another stage is called with such a tensor, the tensor crosses. Results computed
from the inputs alone belong to no stage: every process computes them for itself.

    mask = f(ids)           no owner: computed in every process
    h = embed(ids)          stage 0
    h = layer0(h, mask)     stage 0
    h = layer1(h, mask)     stage 1: h crosses from 0 to 1, mask doesn't
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duoka import virtual
from duoka.base.model_code import where_raised
from duoka.forecast.serving import Capacity
from duoka.planner.placement import Placement
from duoka.runtime.call.chunk import Chunk
from duoka.runtime.call.paged_model import PagedModel, reading_pages
from duoka.runtime.dispatch.arguments import mapped, mapped_call, shared_in, tensors_in
from duoka.runtime.dispatch.dispatch import without_data
from duoka.runtime.dispatch.place_tensors import invent_values, parameter_bytes, place, tensor_names

from .interceptor import BlockInterceptor, PlacedBlock
from .placeholder import unstageable

_MOST_ROUTES = 256


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes and dtype of a tensor."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTransfer:
    """A tensor sent from the stage of its origin, `source`, to a stage in need of it, `target`."""

    source: int
    target: int
    shape: Shape
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """A call of a block or container.

    Parameters
    ----------
    block : str
    stage : int
    arrivals : tuple
        For each tensor among the arguments, in the order of `mapped_call`, the number of the
        transfer that brings it, or None if the tensor doesn't cross.
    outputs
        The block's outputs, and the entries it wrote to each dictionary of `shared_in`, with a
        `Shape` in place of each tensor; None for a container.
    """

    block: str
    stage: int
    arrivals: tuple[int | None, ...]
    outputs: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The calls of one run of a model in order, the devices of its stages, and the transfers."""

    calls: tuple[BlockCall, ...]
    devices: tuple[str, ...]
    transfers: tuple[StageTransfer, ...]

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return len(self.devices)

    def over(self, devices: Sequence[str]) -> Route:
        """Return the route with a stage for each of `devices`; those that it skips have no calls.

        A batch without images may skip a stage that has only a part of the vision tower.
        """
        stages = iter(range(len(devices)))
        try:
            at = [next(s for s in stages if devices[s] == device) for device in self.devices]
        except StopIteration:
            raise unstageable("its batches pass through the GPUs in different orders") from None
        return Route(
            calls=tuple(replace(call, stage=at[call.stage]) for call in self.calls),
            devices=tuple(devices),
            transfers=tuple(
                replace(t, source=at[t.source], target=at[t.target]) for t in self.transfers
            ),
        )

    def course(self) -> tuple[Any, ...]:
        """Return everything but the sizes, to compare routes: calls, devices, transfers, dtypes."""
        calls = [(call.block, call.stage, call.arrivals) for call in self.calls]
        crossing = [(transfer.source, transfer.target) for transfer in self.transfers]
        ranks = [(len(shape.sizes), shape.dtype) for shape in self.shapes()]
        return calls, self.devices, crossing, ranks

    def shapes(self) -> list[Shape]:
        """List the shapes of all transfers, then of all blocks' outputs."""
        shapes: list[Shape] = []

        def note(shape: Shape) -> Shape:
            shapes.append(shape)
            return shape

        self.with_shapes(note)
        return shapes

    def with_shapes(self, change: Callable[[Shape], Shape]) -> Route:
        """Return the route with `change` applied to each shape, in the order of `shapes`."""

        def of(value: Any) -> Any:
            return change(value) if isinstance(value, Shape) else value

        return Route(
            transfers=tuple(replace(t, shape=change(t.shape)) for t in self.transfers),
            calls=tuple(replace(c, outputs=mapped(c.outputs, of, of)) for c in self.calls),
            devices=self.devices,
        )

    def last_calls(self) -> list[int]:
        """Return for each stage the index of the last call that it runs, or sends a tensor to."""
        last = [0] * self.num_stages
        for index, call in enumerate(self.calls):
            last[call.stage] = index
            for arrival in call.arrivals:
                if arrival is not None:
                    last[self.transfers[arrival].source] = index
        return last

    def last_uses(self) -> dict[int, int]:
        """Return for each transfer the index of the last call that gets its tensor."""
        return {
            number: index
            for index, call in enumerate(self.calls)
            for number in call.arrivals
            if number is not None
        }


class Routes:
    """The routes of calls that differ in sizes alone; each size is linear in a few numbers.

    The numbers are, for example, a step's tokens and its rows of logits.

    Parameters
    ----------
    routes : mapping of numbers to Route
        A base route first, then for each number a route in which this number alone is larger.

    Raises
    ------
    ModelError
        If the routes differ in more than sizes.
    """

    def __init__(self, routes: Mapping[tuple[int, ...], Route]) -> None:
        (self._numbers, self._first), *larger = routes.items()
        shapes = self._first.shapes()
        # The slope of each size of each shape, by number. From runs with 10 and 14 tokens, and
        # hidden states [1, 10, 64] and [1, 14, 64], the slopes by tokens are [0, 1, 0].
        self._slopes: list[list[list[int]]] = [[] for _ in shapes]
        for index, (numbers, route) in enumerate(larger):
            step = numbers[index] - self._numbers[index]
            if route.course() != self._first.course():
                raise unstageable(
                    "the activations sent between the model's blocks depend on the number of tokens"
                )
            for slopes, base, larger_shape in zip(
                self._slopes, shapes, route.shapes(), strict=True
            ):
                sizes = zip(base.sizes, larger_shape.sizes, strict=True)
                slopes.append([(to - at) // step for at, to in sizes])
        self._resized_routes: dict[tuple[int, ...], Route] = {}

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each stage."""
        return self._first.devices

    def at(self, *numbers: int) -> Route:
        """Return the route for the given numbers, whose sizes are computed linearly."""
        if numbers not in self._resized_routes:
            if len(self._resized_routes) >= _MOST_ROUTES:
                self._resized_routes.clear()
            self._resized_routes[numbers] = self._resize(numbers)
        return self._resized_routes[numbers]

    def _resize(self, numbers: tuple[int, ...]) -> Route:
        """Compute each size as the base route's, plus slope times difference for each number."""
        steps = [to - at for to, at in zip(numbers, self._numbers, strict=True)]
        slopes = iter(self._slopes)

        def resized(shape: Shape) -> Shape:
            columns = zip(shape.sizes, *next(slopes), strict=True)
            sizes = (size + sum(map(mul, steps, of_size)) for size, *of_size in columns)
            return Shape(tuple(sizes), shape.dtype)

        return self._first.with_shapes(resized)


def find_route(
    model: nn.Module, placement: Placement, run: Callable[[nn.Module, torch.device], object]
) -> Route:
    """Find the route of a call by running a copy of the model without data.

    Parameters
    ----------
    model : nn.Module
    placement : Placement
    run : callable
        Gets a model and a device, and calls the model with inputs on the device.

    Raises
    ------
    ModelError
        If code around the blocks combines tensors of several stages.
    """
    bare = without_data(model)

    def trace(data: str) -> Route:
        copied = copy.deepcopy(bare)
        with virtual.unnamed_gpus([None], data=data):
            device = virtual.virtual_device(0)
            interceptor = BlockInterceptor(copied, placement)
            place(copied, Placement(entries=(("", str(device)),)))
            if data == "cpu":
                invent_values(copied)
            finder = _RouteFinder(copied, placement)
            try:
                with virtual.observe(finder), interceptor.deciding(finder.call):
                    run(copied, device)
            except _Combined as error:
                raise unstageable(
                    "code between the model's blocks combines tensors of the stages "
                    f"{error}{where_raised(error)}"
                ) from error
            return finder.route()

    return virtual.with_values(trace, partial(parameter_bytes, model))


class _Combined(Exception):
    """Raised for an operation around the blocks on operands of several stages."""


# The module's example, with the embedding and layer 0 on one device, layer 1 on another. Arrivals
# have an entry for each tensor among the arguments:
#
#     call                stage   arrivals       transfers
#     embed(ids)          0       (None,)
#     layer0(h, mask)     0       (None, None)
#     layer1(h, mask)     1       (0, None)      0: h, from stage 0 to stage 1
#
# Owners are kept by storage, so that views of a tensor belong to its stage as well.
class _RouteFinder:
    """Listens to a run of the model, and tracks the stage that owns each tensor."""

    def __init__(self, model: nn.Module, placement: Placement) -> None:
        self.calls: list[BlockCall | None] = []
        self.devices: list[str] = []
        self.transfers: list[StageTransfer] = []
        self._in_block = False
        # The stage that owns each storage, by the storage's id; none for results of inputs alone.
        self._stages: dict[int, int] = {}
        # The device of each parameter and buffer, by storage id; code around blocks may use them.
        self._homes = {
            tensor.storage_id: placement.device_of(name) or ""
            for name, tensor in tensor_names(model)
            if isinstance(tensor, virtual.VirtualTensor)
        }
        # By id and target stage: each tensor that crossed, its copy, and the transfer's number.
        self._crossed: dict[tuple[int, int], tuple[Tensor, Tensor, int]] = {}

    def route(self) -> Route:
        """Return the route of the finished run."""
        calls = tuple(call for call in self.calls if call is not None)
        return Route(calls=calls, devices=tuple(self.devices), transfers=tuple(self.transfers))

    def call(
        self, block: PlacedBlock, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a call, and note its stage, arrivals and outputs; see `Decider`."""
        if not self.devices or self.devices[-1] != block.device:
            self.devices.append(block.device)
        stage = len(self.devices) - 1
        arrivals: list[int | None] = []
        args, kwargs = mapped_call(
            args, kwargs, partial(self._bring, stage, arrivals), block.caches
        )
        index = len(self.calls)
        self.calls.append(None)
        outputs = None
        if block.is_container:
            result = forward(*args, **kwargs)
        else:
            entries = [(shared, dict(shared)) for shared in shared_in(args, kwargs)]
            self._in_block = True
            try:
                result = forward(*args, **kwargs)
            finally:
                self._in_block = False
            written = [
                {key: value for key, value in shared.items() if earlier.get(key) is not value}
                for shared, earlier in entries
            ]
            for tensor in tensors_in((result, written)):
                if isinstance(tensor, virtual.VirtualTensor):
                    self._stages[tensor.storage_id] = stage
            outputs = mapped((result, written), _shape_of)
        self.calls[index] = BlockCall(
            block=block.name, stage=stage, arrivals=tuple(arrivals), outputs=outputs
        )
        return result

    def _bring(self, stage: int, arrivals: list[int | None], tensor: Tensor) -> Tensor:
        """Return a tensor argument of a call in a stage: a copy if it crosses, which is noted."""
        source = self._stage_of(tensor)
        if source is None or source == stage:
            arrivals.append(None)
            return tensor
        key = (id(tensor), stage)
        if key not in self._crossed:
            transfer = StageTransfer(
                source=source,
                target=stage,
                shape=Shape(tuple(tensor.shape), tensor.dtype),
                requires_grad=tensor.requires_grad,
            )
            copied = tensor.clone()
            self._stages[copied.storage_id] = stage  # type: ignore[attr-defined]
            self._crossed[key] = tensor, copied, len(self.transfers)
            self.transfers.append(transfer)
        _, copied, number = self._crossed[key]
        arrivals.append(number)
        return copied

    def _stage_of(self, tensor: Any) -> int | None:
        """Return the stage that owns a tensor; None if every process has or computes the tensor."""
        if not isinstance(tensor, virtual.VirtualTensor):
            return None
        home = self._homes.get(tensor.storage_id)
        if home is None:
            return self._stages.get(tensor.storage_id)
        # A parameter belongs to the latest stage on its device: with the devices A, B, A so far, a
        # parameter on A belongs to stage 2, and never crosses to its own device.
        stages = (at for at in reversed(range(len(self.devices))) if self.devices[at] == home)
        return next(stages, None)

    def allocated(self, gpu: object, storage_id: int, num_bytes: int) -> None:
        """Do nothing."""

    def freed(self, gpu: object, storage_id: int) -> None:
        """Do nothing: ids of storages are never reused."""

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Assign the results of an operation around blocks to the stage of its operands."""
        if self._in_block:
            return
        owners = (self._stage_of(tensor) for tensor in _operands(args, kwargs))
        stages = {owner for owner in owners if owner is not None}
        if not stages:
            return
        if len(stages) > 1:
            raise _Combined(" and ".join(map(str, sorted(stages))))
        stage = stages.pop()
        for tensor in tensors_in(result if isinstance(result, (tuple, list)) else [result]):
            if isinstance(tensor, virtual.VirtualTensor) and tensor.storage_id not in self._homes:
                self._stages[tensor.storage_id] = stage


def _operands(args: Any, kwargs: Any) -> Iterator[Tensor]:
    yield from tensors_in(args)
    yield from tensors_in(list(kwargs.values()))


def _shape_of(tensor: Tensor) -> Any:
    return Shape(tuple(tensor.shape), tensor.dtype)


# The engine's steps whose routes are found: (tokens, rows of logits). Each of the two is larger in
# one of the steps, and none of the steps is padded.
_STEP_SIZES = (10, 2), (14, 2), (10, 4)
_STEP_CAPACITY = Capacity(sequences=4, context_tokens=16, pages=4, page_tokens=16, step_tokens=16)


def find_step_routes(model: PreTrainedModel, placement: Placement) -> Routes:
    """Find the routes of engine steps over a paged cache, by tokens and rows of logits.

    Both numbers of `Routes.at` include padding. Nothing is computed, and the model needs no data.

    Raises
    ------
    ModelError
        If the model can't read from pages, or can't run in stages.
    """

    def run(tokens: int, rows: int, copied: Any, device: torch.device) -> None:
        sizes = [tokens - rows + 1, *[1] * (rows - 1)]
        chunks = [Chunk(number, [0] * size, 0, [number], ()) for number, size in enumerate(sizes)]
        paged = PagedModel(copied, _STEP_CAPACITY, device, is_known=True)
        with torch.no_grad():
            paged.call(paged.step(chunks), device)()

    def start(copied: Any, device: torch.device) -> None:
        PagedModel(copied, _STEP_CAPACITY, device).start()

    with reading_pages(model):
        find_route(model, placement, start)
        return Routes(
            {sizes: find_route(model, placement, partial(run, *sizes)) for sizes in _STEP_SIZES}
        )

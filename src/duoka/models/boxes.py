"""Tensors described as boxes of other tensors, for finding out what a conversion moves where.

A `Sketch` goes through the code that converts a checkpoint's tensors in the place of a tensor and
records splitting, joining, stacking and transposing instead of doing it. Operations that move
single elements about cannot be described by boxes and raise `IndescribableError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Box = tuple[tuple[int, int], ...]
"""A half-open range for each dimension."""


class IndescribableError(Exception):
    """An operation whose result isn't made of boxes of its inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCopy:
    """A box of one checkpoint tensor, and the box of one parameter or buffer that it fills.

    `axes` has for each dimension of the target the source's dimension along it; None where the
    source has none, as along a stack of experts. Dimensions of the source that are absent have
    extent 1. While the target is a `Sketch` it has no name.
    """

    target: str = ""
    source: str
    source_shape: tuple[int, ...]
    source_box: Box
    target_box: Box
    axes: tuple[int | None, ...]

    @property
    def source_slices(self) -> tuple[slice, ...]:
        """The box as an index, as tensors and safetensors' lazy slices take it."""
        return tuple(slice(start, stop) for start, stop in self.source_box)

    def orient(self, part: Tensor) -> Tensor:
        """Return a view of ``source[source_slices]`` with the dimensions of the target's box."""
        axes = [axis for axis in self.axes if axis is not None]
        dropped = [axis for axis in range(part.ndim) if axis not in axes]
        extents = [stop - start for start, stop in self.target_box]
        return part.permute((*axes, *dropped)).reshape(extents)

    def place(self, target: Tensor) -> Tensor:
        """Return the view of the parameter or buffer that the piece fills."""
        return target[tuple(slice(start, stop) for start, stop in self.target_box)]

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy the piece from the whole checkpoint tensor into the whole target."""
        with torch.no_grad():
            self.place(target).copy_(self.orient(source[self.source_slices]))

    def cut(self, dim: int, start: int, stop: int) -> TensorCopy | None:
        """Return what lies in [start, stop) of the target's `dim`, counted from `start`."""
        low, high = max(self.target_box[dim][0], start), min(self.target_box[dim][1], stop)
        if low >= high:
            return None
        origin, axis = self.source_box, self.axes[dim]
        if axis is not None:
            shift = origin[axis][0] - self.target_box[dim][0]
            origin = _with_extent(origin, axis, (low + shift, high + shift))
        box = _with_extent(self.target_box, dim, (low - start, high - start))
        return replace(self, source_box=origin, target_box=box)

    def shift(self, dim: int, by: int) -> TensorCopy:
        """Return the piece moved along the target's `dim`."""
        start, stop = self.target_box[dim]
        return replace(self, target_box=_with_extent(self.target_box, dim, (start + by, stop + by)))


def _with_extent(box: Box, dim: int, extent: tuple[int, int]) -> Box:
    return (*box[:dim], extent, *box[dim + 1 :])


class Sketch:
    """A shape, and the parts that fill it."""

    def __init__(self, shape: Sequence[int], parts: Sequence[TensorCopy]) -> None:
        self.shape = torch.Size(shape)
        self.parts = tuple(parts)

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> Sketch:
        """Describe a whole tensor."""
        box = tuple((0, extent) for extent in shape)
        whole = TensorCopy(
            source=name,
            source_shape=tuple(shape),
            source_box=box,
            target_box=box,
            axes=tuple(range(len(box))),
        )
        return cls(shape, [whole])

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or one extent of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    def __getitem__(self, index: Any) -> Sketch:
        if index is Ellipsis:
            return self
        raise IndescribableError(f"indexing by {index!r}")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        # A method call is the function of the same name, if that is one of those described.
        operation = _METHODS.get(name)
        if operation is None:
            raise IndescribableError(name)
        return lambda *args, **kwargs: operation(self, *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        operation = _METHODS.get(getattr(func, "__name__", ""))
        if operation is None:
            raise IndescribableError(str(func))
        return operation(*args, **(kwargs or {}))


def _same(sketch: Sketch, *_args: Any, **_kwargs: Any) -> Sketch:
    return sketch


def _narrow(sketch: Sketch, dim: int, start: int, length: int) -> Sketch:
    dim %= sketch.ndim
    shape = (*sketch.shape[:dim], length, *sketch.shape[dim + 1 :])
    cuts = (part.cut(dim, start, start + length) for part in sketch.parts)
    return Sketch(shape, [part for part in cuts if part is not None])


def _split(sketch: Sketch, sizes: int | Sequence[int], dim: int = 0) -> tuple[Sketch, ...]:
    extent = sketch.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, extent - start) for start in range(0, extent, sizes)]
    if sum(sizes) != extent:
        raise ValueError(f"{extent} cannot be split into {list(sizes)}")
    return tuple(_consecutive(sketch, sizes, dim))


def _consecutive(sketch: Sketch, sizes: Sequence[int], dim: int) -> Iterator[Sketch]:
    start = 0
    for size in sizes:
        yield _narrow(sketch, dim, start, size)
        start += size


def _chunk(sketch: Sketch, chunks: int, dim: int = 0) -> tuple[Sketch, ...]:
    return _split(sketch, -(-sketch.shape[dim] // chunks), dim)


def _unbind(sketch: Sketch, dim: int = 0) -> tuple[Sketch, ...]:
    return tuple(_squeeze(single, dim) for single in _split(sketch, 1, dim))


def _squeeze(sketch: Sketch, dim: int) -> Sketch:
    dim %= sketch.ndim
    if sketch.shape[dim] != 1:
        return sketch
    return Sketch(
        _without(sketch.shape, dim),
        [
            replace(
                part,
                target_box=_without(part.target_box, dim),
                axes=_without(part.axes, dim),
            )
            for part in sketch.parts
        ],
    )


def _without(items: Sequence[Any], index: int) -> tuple[Any, ...]:
    return (*items[:index], *items[index + 1 :])


def _unsqueeze(sketch: Sketch, dim: int) -> Sketch:
    dim %= sketch.ndim + 1
    return Sketch(
        (*sketch.shape[:dim], 1, *sketch.shape[dim:]),
        [
            replace(
                part,
                target_box=(*part.target_box[:dim], (0, 1), *part.target_box[dim:]),
                axes=(*part.axes[:dim], None, *part.axes[dim:]),
            )
            for part in sketch.parts
        ],
    )


def _cat(sketches: Sequence[Sketch], dim: int = 0) -> Sketch:
    first = sketches[0]
    dim %= first.ndim
    parts: list[TensorCopy] = []
    extent = 0
    for sketch in sketches:
        if _without(sketch.shape, dim) != _without(first.shape, dim):
            raise ValueError(f"{tuple(sketch.shape)} cannot be joined to {tuple(first.shape)}")
        parts += (part.shift(dim, extent) for part in sketch.parts)
        extent += sketch.shape[dim]
    return Sketch((*first.shape[:dim], extent, *first.shape[dim + 1 :]), parts)


def _stack(sketches: Sequence[Sketch], dim: int = 0) -> Sketch:
    return _cat([_unsqueeze(sketch, dim) for sketch in sketches], dim)


def _permute(sketch: Sketch, order: Sequence[int]) -> Sketch:
    return Sketch(
        [sketch.shape[dim] for dim in order],
        [
            replace(
                part,
                target_box=tuple(part.target_box[dim] for dim in order),
                axes=tuple(part.axes[dim] for dim in order),
            )
            for part in sketch.parts
        ],
    )


def _transpose(sketch: Sketch, dim0: int, dim1: int) -> Sketch:
    order = list(range(sketch.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(sketch, order)


def _transpose_2d(sketch: Sketch) -> Sketch:
    return _transpose(sketch, 0, 1)


_METHODS: dict[str, Callable[..., Any]] = {
    "cat": _cat,
    "chunk": _chunk,
    "clone": _same,
    "contiguous": _same,
    "detach": _same,
    "narrow": _narrow,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "t": _transpose_2d,
    "to": _same,
    "transpose": _transpose,
    "unbind": _unbind,
    "unsqueeze": _unsqueeze,
}

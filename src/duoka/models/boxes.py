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

Box = tuple[tuple[int, int], ...]
"""A half-open range for each dimension."""


class IndescribableError(Exception):
    """An operation whose result isn't made of boxes of its inputs."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a named tensor of a whole `shape`, and where it lies.

    `origin` is what is taken of the tensor, `at` where that lies in the sketch. `axes` has for each
    dimension of the sketch the source's dimension along it; None for one of extent 1 that the
    source doesn't have. Dimensions of the source that are absent have extent 1.
    """

    source: str
    shape: tuple[int, ...]
    origin: Box
    at: Box
    axes: tuple[int | None, ...]

    def cut(self, dim: int, start: int, stop: int) -> Part | None:
        """Return what lies in [start, stop) of `dim`, counted from `start`, or None."""
        low, high = max(self.at[dim][0], start), min(self.at[dim][1], stop)
        if low >= high:
            return None
        origin, axis = self.origin, self.axes[dim]
        if axis is not None:
            shift = origin[axis][0] - self.at[dim][0]
            origin = _with_extent(origin, axis, (low + shift, high + shift))
        at = _with_extent(self.at, dim, (low - start, high - start))
        return Part(self.source, self.shape, origin, at, self.axes)

    def shift(self, dim: int, by: int) -> Part:
        """Return the part moved along `dim`."""
        start, stop = self.at[dim]
        at = _with_extent(self.at, dim, (start + by, stop + by))
        return Part(self.source, self.shape, self.origin, at, self.axes)


def _with_extent(box: Box, dim: int, extent: tuple[int, int]) -> Box:
    return (*box[:dim], extent, *box[dim + 1 :])


class Sketch:
    """A shape, and the parts that fill it."""

    def __init__(self, shape: Sequence[int], parts: Sequence[Part]) -> None:
        self.shape = torch.Size(shape)
        self.parts = tuple(parts)

    @classmethod
    def of(cls, name: str, shape: Sequence[int]) -> Sketch:
        """Describe a whole tensor."""
        box = tuple((0, extent) for extent in shape)
        return cls(shape, [Part(name, tuple(shape), box, box, tuple(range(len(box))))])

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
            replace(part, at=_without(part.at, dim), axes=_without(part.axes, dim))
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
                at=(*part.at[:dim], (0, 1), *part.at[dim:]),
                axes=(*part.axes[:dim], None, *part.axes[dim:]),
            )
            for part in sketch.parts
        ],
    )


def _cat(sketches: Sequence[Sketch], dim: int = 0) -> Sketch:
    first = sketches[0]
    dim %= first.ndim
    parts: list[Part] = []
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
                at=tuple(part.at[dim] for dim in order),
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

"""Trace a conversion of tensors without data: the boxes of the sources that make each result.

A conversion splits, joins, stacks and transposes tensors. A `CopyTracer` runs the conversion on the
meta device. Most operations return views; offset and strides of a view tell its box of the viewed
tensor. Joining, stacking and copying create new tensors, for which the tracer records the box that
each operand fills. So a result can be traced back, copy by copy, to boxes of the sources:

    gate, up [2, 3] → stack → cat        made₂ [2, 4, 3]
    made₂[:, 0:2] ← made₁, made₁[0] ← gate₀, made₁[1] ← gate₁
    box of gate₁ (0:2, 0:3) → box of made₂ (1:2, 0:2, 0:3)

Operations that permute single elements aren't made of boxes, and raise `IndescribableError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: the half-open range (start, stop) of each dimension."""


class IndescribableError(Exception):
    """An operation whose result isn't made of boxes of its inputs."""


class TensorCopy(NamedTuple):
    """A box of a checkpoint tensor, and the box of a parameter or buffer to fill with it.

    `axes` has, for each dimension of the target, the corresponding dimension of the source, or None
    if the target's box has extent 1 there, as along a stack of experts. Dimensions of the source
    that aren't in `axes` have extent 1 in its box. While a conversion is traced `target` is empty.
    """

    source: str
    source_shape: tuple[int, ...]
    source_box: Box
    target_box: Box
    axes: tuple[int | None, ...]
    target: str = ""

    @property
    def source_slices(self) -> tuple[slice, ...]:
        """The source's box as an index for a tensor, or for a lazy slice of safetensors."""
        return as_slices(self.source_box)

    def orient(self, part: Tensor) -> Tensor:
        """Permute ``source[source_slices]``, passed as `part`, to the shape of the target's box."""
        axes = [axis for axis in self.axes if axis is not None]
        dropped = [axis for axis in range(part.ndim) if axis not in axes]
        extents = [stop - start for start, stop in self.target_box]
        return part.permute((*axes, *dropped)).reshape(extents)

    def place(self, target: Tensor) -> Tensor:
        """Return this copy's view of the parameter or buffer to fill."""
        return target[as_slices(self.target_box)]

    # Rows 4:8 of a source fill rows 0:4 of a target. Restricted to rows 6:10 of the source, the
    # copy has source rows 6:8 and target rows 2:4: both lose their first two rows.
    def restrict(self, box: Box) -> TensorCopy | None:
        """Return the part of the copy whose source lies in a box; None if no element does."""
        common = intersect(self.source_box, box)
        if common is None:
            return None
        target_box = []
        for axis, (start, stop) in zip(self.axes, self.target_box, strict=True):
            if axis is not None:
                start += common[axis][0] - self.source_box[axis][0]
                stop = start + common[axis][1] - common[axis][0]
            target_box.append((start, stop))
        return self._replace(source_box=common, target_box=tuple(target_box))


def whole_box(shape: Iterable[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple((0, extent) for extent in shape)


def as_slices(box: Box) -> tuple[slice, ...]:
    """Convert a box to an index of a tensor."""
    return tuple(slice(start, stop) for start, stop in box)


def intersect(box: Box, bounds: Box) -> Box | None:
    """Return the intersection of two boxes; None if empty."""
    common = tuple(
        (max(start, lower), min(stop, upper))
        for (start, stop), (lower, upper) in zip(box, bounds, strict=True)
    )
    return None if any(start >= stop for start, stop in common) else common


class _Filling(NamedTuple):
    """A box of a new tensor, and the operand copied there.

    `dims` maps the new tensor's axes to the operand's dimensions.
    """

    box: Box
    operand: Tensor
    dims: Mapping[int, int]


class CopyTracer(TorchFunctionMode):
    """Runs code on sources without data, and traces results back to boxes of the sources.

    Parameters
    ----------
    shapes : mapping of str to sequence of int
        Shapes of the sources by name. Code that runs under this mode must use `tensors` as sources.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self.tensors = {n: torch.empty(shape, device="meta") for n, shape in shapes.items()}
        # By storage: the tensor that covers it, and the source's name or the tensor's fillings.
        self._origins: dict[int, tuple[Tensor, str | list[_Filling]]] = {
            _storage(tensor): (tensor, name) for name, tensor in self.tensors.items()
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in ("cat", "stack"):
            operands = args[0] if args else (kwargs or {})["tensors"]
            dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim", 0)
            self._record_fillings(result, operands, dim % result.ndim, is_stack=name == "stack")
        elif name in ("contiguous", "clone", "to") and _storage(result) != _storage(args[0]):
            dims = {axis: axis for axis in range(result.ndim)}
            filling = _Filling(whole_box(result.shape), args[0], dims)
            self._origins[_storage(result)] = result, [filling]
        return result

    def _record_fillings(
        self, result: Tensor, operands: Sequence[Tensor], dim: int, *, is_stack: bool
    ) -> None:
        """Record operands that fill a tensor in sequence along a dimension."""
        box, start, fillings = whole_box(result.shape), 0, []
        dims = {axis: axis - (is_stack and axis > dim) for axis in range(result.ndim)}
        if is_stack:
            del dims[dim]
        for operand in operands:
            stop = start + (1 if is_stack else operand.shape[dim])
            fillings.append(_Filling((*box[:dim], (start, stop), *box[dim + 1 :]), operand, dims))
            start = stop
        self._origins[_storage(result)] = result, fillings

    # A recursion from a result back to the sources. At each new tensor the box is intersected with
    # the boxes of its fillings, and the copies of each operand are shifted to the operand's box.
    # In the module's example, with `ups` for the stack of up₀ and up₁:
    #
    #   tensor   box             meaning                   box in made₂
    #   made₂    0:2, 0:4, 0:3   the result                0:2, 0:4, 0:3
    #   ups      0:2, 0:2, 0:3   the second of the cat     0:2, 2:4, 0:3   axis 1 shifted by 2
    #   up₁      0:2, 0:3        the second of the stack   1:2, 2:4, 0:3   axes (None, 0, 1)
    def copies(self, value: Tensor) -> Iterator[TensorCopy]:
        """Yield the copies from sources that together fill a result."""
        whole, origin = self._origins.get(_storage(value), (value, None))
        if origin is None:
            raise IndescribableError("neither views nor copies of the sources")
        if not value.numel():
            return
        box, axes = _box_of(value, whole)
        if isinstance(origin, str):
            yield TensorCopy(
                source=origin,
                source_shape=tuple(whole.shape),
                source_box=box,
                target_box=whole_box(value.shape),
                axes=axes,
            )
            return
        for filling in origin:
            common = intersect(box, filling.box)
            if common is None:
                continue
            part = filling.operand
            for axis, dim in filling.dims.items():
                start, stop = common[axis]
                if (start, stop) != filling.box[axis]:
                    part = part.narrow(dim, start - filling.box[axis][0], stop - start)
            for copy in self.copies(part):
                target = [
                    _shift(copy, filling.dims.get(axis), common[axis][0] - box[axis][0])
                    if axis is not None
                    else ((0, 1), None)
                    for axis in axes
                ]
                yield copy._replace(
                    target_box=tuple(ends for ends, _ in target),
                    axes=tuple(axis for _, axis in target),
                )


def _shift(copy: TensorCopy, dim: int | None, shift: int) -> tuple[tuple[int, int], int | None]:
    """Return the range of a copy's target along a dimension, shifted, and the source's dimension.

    For `dim` None, the new axis of a stack, the range has extent 1 and the source no dimension.
    """
    if dim is None:
        return (shift, shift + 1), None
    start, stop = copy.target_box[dim]
    return (start + shift, stop + shift), copy.axes[dim]


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


# A tensor [4, 6] has the strides (6, 1), so a view of it at offset 8 = 1 · 6 + 2 · 1 starts at
# [1, 2]. A dimension of the view with extent 3 and stride 6 runs along axis 0: rows 1:4. A view has
# no box if one of its strides belongs to no axis (2 for every other column), or if a dimension
# extends beyond its axis.
def _box_of(view: Tensor, whole: Tensor) -> tuple[Box, tuple[int | None, ...]]:
    """Return a view's box of `whole`, and the axis of each dimension of the view.

    Dimensions of extent 1 have the axis None. Raises IndescribableError if the view is no box.
    """
    if view is whole:
        return whole_box(whole.shape), tuple(
            axis if extent > 1 else None for axis, extent in enumerate(whole.shape)
        )
    offset, strides = int(view.storage_offset() - whole.storage_offset()), whole.stride()
    box = [(0, 1)] * whole.ndim
    by_stride = {}
    for axis in sorted(range(whole.ndim), key=strides.__getitem__, reverse=True):
        if whole.shape[axis] > 1:
            start, offset = divmod(offset, strides[axis])
            box[axis] = (start, start + 1)
            by_stride[strides[axis]] = axis
    axes: list[int | None] = []
    for extent, stride in zip(view.shape, view.stride(), strict=True):
        along = by_stride.pop(stride, None) if extent > 1 else None
        if along is not None and box[along][0] + extent <= whole.shape[along]:
            box[along] = (box[along][0], box[along][0] + extent)
        elif extent > 1:
            raise IndescribableError("a view that is no box")
        axes.append(along)
    return tuple(box), tuple(axes)

"""Boxes traced without data, against the same operations on tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duoka.models.boxes import CopyTracer, IndescribableError


def build_from(tracer: CopyTracer, traced: Tensor, sources: dict[str, Tensor]) -> Tensor:
    target = torch.full(traced.shape, -1.0)
    for copy in tracer.copies(traced):
        part = sources[copy.source][copy.source_slices]
        copy.place(target).copy_(copy.orient(part))
    return target


def run(data: st.DataObject, tensors: list[Tensor], choices: list[tuple[Any, ...]]) -> Tensor:
    """Apply the operations that were chosen; choose them the first time."""
    draw, is_first = data.draw, not choices
    for number in range(draw(st.integers(1, 5)) if is_first else len(choices)):
        if is_first:
            ndim = tensors[0].ndim
            names = ["cat", "stack", "split", "chunk", "transpose", "unbind", "to"]
            dim, other = (draw(st.integers(0, ndim - 1)) for _ in range(2))
            size = tensors[0].shape[dim]
            cut = draw(st.integers(0, size))
            choices.append((draw(st.sampled_from(names)), dim, other, cut, size, ndim))
        name, dim, other, cut, size, ndim = choices[number]
        match name:
            case "cat":
                tensors = [torch.cat(tensors, dim)] * 2
            case "stack" if ndim < 5:
                tensors = [torch.stack(tensors, dim=dim)]
            case "split":
                tensors = [torch.split(tensors[0], [cut, size - cut], dim)[1]]
            case "chunk" if size:
                tensors = [torch.chunk(tensors[0], 2, dim)[0].contiguous()]
            case "transpose":
                tensors = [torch.transpose(each, dim, other) for each in tensors]
            case "unbind" if ndim > 1 and cut < size:
                tensors = [tensors[0].unbind(dim)[cut]]
            case "to":
                tensors = [tensors[0].to(torch.float64).clone()]
    return tensors[0]


@given(data=st.data())
def test_any_sequence_of_operations(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    sources = {name: torch.rand(shape) for name in "abc"}
    choices: list[tuple[Any, ...]] = []
    computed = run(data, list(sources.values()), choices)
    tracer = CopyTracer(dict.fromkeys(sources, shape))
    with tracer:
        traced = run(data, list(tracer.tensors.values()), choices)
    assert traced.shape == computed.shape
    assert torch.equal(build_from(tracer, traced, sources), computed.float())


@pytest.mark.parametrize(
    "operation",
    [lambda a: a.reshape(16), lambda a: a[::2], lambda a: a.exp(), lambda a: a.flip(0)],
)
def test_operations_that_boxes_cannot_describe(operation: Any) -> None:
    tracer = CopyTracer({"a": (4, 4)})
    with tracer:
        result = operation(tracer.tensors["a"])
    with pytest.raises(IndescribableError):
        list(tracer.copies(result))

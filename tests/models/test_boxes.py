"""Sketches against tensors: what is described must be what is computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duoka.models.boxes import IndescribableError, Sketch


def build_from(sketch: Sketch, sources: dict[str, Tensor]) -> Tensor:
    target = torch.full(sketch.shape, -1.0)
    for part in sketch.parts:
        part.copy(sources[part.source], target)
    return target


@given(data=st.data())
def test_any_sequence_of_operations(data: st.DataObject) -> None:
    draw = data.draw
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    sources = {name: torch.rand(shape) for name in "abc"}
    real = list(sources.values())
    drawn = [Sketch.of(name, shape) for name in sources]
    for _ in range(draw(st.integers(1, 5))):
        ndim = real[0].ndim
        dim = draw(st.integers(0, ndim - 1))
        match draw(st.sampled_from(["cat", "stack", "split", "chunk", "transpose", "unbind"])):
            case "cat":
                real, drawn = [torch.cat(real, dim)] * 2, [torch.cat(drawn, dim)] * 2
            case "stack" if ndim < 5:
                real, drawn = [torch.stack(real, dim)], [torch.stack(drawn, dim)]
            case "split":
                cut = draw(st.integers(0, real[0].shape[dim]))
                sizes = [cut, real[0].shape[dim] - cut]
                real = [torch.split(real[0], sizes, dim)[1]]
                drawn = [torch.split(drawn[0], sizes, dim)[1]]
            case "chunk" if real[0].shape[dim]:
                real = [torch.chunk(real[0], 2, dim)[0].contiguous()]
                drawn = [torch.chunk(drawn[0], 2, dim)[0].contiguous()]
            case "transpose":
                other = draw(st.integers(0, ndim - 1))
                real = [torch.transpose(each, dim, other) for each in real]
                drawn = [torch.transpose(each, dim, other) for each in drawn]
            case "unbind" if ndim > 1 and real[0].shape[dim]:
                real, drawn = [real[0].unbind(dim)[-1]], [drawn[0].unbind(dim)[-1]]
    assert drawn[0].shape == real[0].shape
    assert torch.equal(build_from(drawn[0], sources), real[0])


def test_what_cannot_be_described() -> None:
    sketch = Sketch.of("a", (4, 4))
    for operation in (lambda: sketch.reshape(16), lambda: sketch[0], lambda: torch.exp(sketch)):
        with pytest.raises(IndescribableError):
            operation()
    assert sketch[...] is sketch
    assert (sketch.ndim, sketch.dim(), sketch.size(0), sketch.numel()) == (2, 2, 4, 16)


def test_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="split"):
        torch.split(Sketch.of("a", (4,)), [1, 2])
    with pytest.raises(ValueError, match="joined"):
        torch.cat([Sketch.of("a", (4, 2)), Sketch.of("b", (4, 3))])

"""Repairs of operands of plain operations."""

from __future__ import annotations

from pathlib import Path

import pytest
from repairing import Shape, changed, repair_shape

SHAPES = [
    Shape(
        name="residual",
        body="""
        return x + self.b(self.a(x))
        """,
        lines=["return x.to(self.b.weight.device) + self.b(self.a(x))"],
    ),
    Shape(
        name="aug",
        body="""
        h = self.b(self.a(x))
        h += x
        return h
        """,
        lines=[
            "h += x.to(h.device)",
        ],
    ),
    Shape(
        name="aug2",
        body="""
        x = self.a(x)
        x *= self.b(x)
        return x
        """,
        lines=[
            "x *= self.b(x).to(x.device)",
        ],
    ),
    Shape(
        name="inplace-index",
        body="""
        h = self.b(self.a(x))
        m = x[:, 0] > 0
        h[m] = self.a(x)[m]
        return h
        """,
        lines=[
            "h[m.to(h.device)] = self.a(x)[m].to(h.device)",
        ],
    ),
    Shape(
        name="inplace-index2",
        body="""
        h = self.b(self.a(x))
        idx = torch.zeros(2, dtype=torch.long).to(x.device)
        h[idx] = 1.0
        return h
        """,
        lines=[
            "h[idx.to(h.device)] = 1.0",
        ],
    ),
    Shape(
        name="gather",
        body="""
        h = self.b(self.a(x))
        i = x.argmax(-1, keepdim=True)
        return h.gather(-1, i) + h[i.view(-1) % 3]
        """,
        lines=[
            "return h.gather(-1, i.to(h.device)) + h[(i.view(-1) % 3).to(h.device)]",
        ],
    ),
    Shape(
        name="where",
        body="""
        h = self.b(self.a(x))
        return torch.where(x > 0, h, torch.zeros_like(x))
        """,
        lines=[
            "result = x > 0",
            "return torch.where(result, h.to(result.device), torch.zeros_like(x))",
        ],
    ),
    Shape(
        name="ifexp",
        body="""
        h = self.b(self.a(x))
        return (x if h.shape[0] > 1 else x) + h
        """,
        lines=[
            "return (x if h.shape[0] > 1 else x).to(h.device) + h",
        ],
    ),
    Shape(
        name="minus",
        body="""
        h = self.b(self.a(x))
        return -x @ h.T + (x - 1) @ h.T
        """,
        lines=[
            "return (-x).to(h.device) @ h.T + (x - 1).to(h.device) @ h.T",
        ],
    ),
    Shape(
        name="masked_scatter",
        body="""
        h = self.a(x)
        f = self.b(x)
        mask = h > 0
        return h.masked_scatter(mask, f)
        """,
        lines=[
            "return h.masked_scatter(mask, f.to(h.device))",
        ],
    ),
    Shape(
        name="same-twice",
        body="""
        h = self.b(self.a(x))
        return (h + x) * (x + h)
        """,
        lines=[
            "return (h + x.to(h.device)) * (x.to(h.device) + h)",
        ],
    ),
    Shape(
        name="method",
        body="""
        h = self.b(self.a(x))
        return h.add(x).mul(other=x)
        """,
        lines=[
            "return h.add(x.to(h.device)).mul(other=x.to(h.device))",
        ],
    ),
    Shape(
        name="out",
        body="""
        h = self.b(self.a(x))
        w = torch.einsum('bi,bi->b', x, h)
        return w
        """,
        lines=[
            "w = torch.einsum('bi,bi->b', x.to(h.device), h)",
        ],
    ),
    Shape(
        name="clamp",
        body="""
        h = self.b(self.a(x))
        return torch.minimum(x, h)
        """,
        lines=[
            "return torch.minimum(x.to(h.device), h)",
        ],
    ),
    Shape(
        name="two-wrong",
        body="""
        h = self.b(self.a(x))
        z = self.a(x)
        return torch.addcmul(h, x, z)
        """,
        lines=[
            "return torch.addcmul(h.to(x.device), x, z)",
        ],
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_fault_is_cured_and_the_cure_proved(shape: Shape, tmp_path: Path) -> None:
    repairs = repair_shape(shape, tmp_path)
    assert [patch.reason for patch in repairs] == [""]
    assert repairs.proved
    assert changed(repairs) == shape.lines

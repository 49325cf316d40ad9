"""Repairs of operands in lists."""

from __future__ import annotations

from pathlib import Path

import pytest
from repairing import Shape, changed, repair_shape

SHAPES = [
    Shape(
        name="cat-lit",
        body="""
        h = self.a(x)
        g = self.b(h)
        return torch.cat([h, g, h], dim=-1)
        """,
        lines=[
            "return torch.cat([h, g.to(h.device), h], dim=-1)",
        ],
    ),
    Shape(
        name="cat-star",
        body="""
        rest = [self.a(x), self.b(x)]
        g = self.b(x)
        return torch.cat([g, *rest], dim=-1)
        """,
        lines=["return torch.cat([g, *[each.to(g.device) for each in rest]], dim=-1)"],
    ),
    Shape(
        name="cat-comp",
        body="""
        return torch.cat([f(x) for f in (self.a, self.b)], dim=-1)
        """,
        lines=[
            "parts = [f(x) for f in (self.a, self.b)]",
            "return torch.cat([each.to(parts[-1].device) for each in parts], dim=-1)",
        ],
    ),
    Shape(
        name="cat-tuple-gen",
        body="""
        return torch.cat(tuple(f(x) for f in (self.a, self.b)), dim=-1)
        """,
        lines=[
            "parts = tuple(f(x) for f in (self.a, self.b))",
            "return torch.cat([each.to(parts[-1].device) for each in parts], dim=-1)",
        ],
    ),
    Shape(
        name="cat-dict",
        body="""
        d = {'a': self.a(x), 'b': self.b(x)}
        return torch.stack(list(d.values()))
        """,
        lines=[
            "parts = list(d.values())",
            "return torch.stack([each.to(parts[-1].device) for each in parts])",
        ],
    ),
    Shape(
        name="cat-call",
        body="""
        return torch.stack(self.all(x))
        """,
        methods="""
        def all(self, x):
            return [self.a(x), self.b(x)]
        """,
        lines=[
            "parts = list(self.all(x))",
            "return torch.stack([each.to(parts[-1].device) for each in parts])",
        ],
    ),
    Shape(
        name="cat-slice",
        body="""
        ps = [self.a(x), self.a(x), self.b(x)]
        return torch.cat(ps[1:], dim=0)
        """,
        lines=[
            "parts = ps[1:]",
            "return torch.cat([each.to(parts[-1].device) for each in parts], dim=0)",
        ],
    ),
    Shape(
        name="cat-plus",
        body="""
        ps = [self.a(x), self.b(x)]
        return torch.cat([x] + ps, dim=0)
        """,
        lines=[
            "parts = [x] + ps",
            "return torch.cat([each.to(parts[0].device) for each in parts], dim=0)",
        ],
    ),
    Shape(
        name="compare",
        body="""
        h = self.b(self.a(x))
        return (h > x).float()
        """,
        lines=[
            "return (h > x.to(h.device)).float()",
        ],
    ),
    Shape(
        name="comp-elt",
        body="""
        h = self.b(self.a(x))
        return torch.stack([h[i] + x[i] for i in range(len(h))])
        """,
        lines=[
            "return torch.stack([h[i] + x[i].to(h.device) for i in range(len(h))])",
        ],
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_fault_is_cured_and_the_cure_proved(shape: Shape, tmp_path: Path) -> None:
    repairs = repair_shape(shape, tmp_path)
    assert [patch.reason for patch in repairs] == [""]
    assert repairs.proved
    assert changed(repairs) == shape.lines

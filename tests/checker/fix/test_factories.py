"""Repairs of tensors that are made or kept on the wrong device."""

from __future__ import annotations

from pathlib import Path

import pytest
from repairing import Shape, changed, repair_shape

SHAPES = [
    Shape(
        name="layer-made-in-forward",
        body="""
        h = self.b(x)
        return nn.LayerNorm(h.shape[-1])(h)
        """,
        lines=["return nn.LayerNorm(h.shape[-1], device=h.device)(h)"],
    ),
    Shape(
        name="numpy",
        body="""
        h = self.b(x)
        return h * float(h.detach().numpy().max())
        """,
        lines=['return h * float(h.detach().to("cpu").numpy().max())'],
    ),
    Shape(
        name="factory-arange",
        body="""
        h = self.b(self.a(x))
        pos = torch.arange(4)
        return h + pos
        """,
        lines=[
            "pos = torch.arange(4, device=h.device)",
        ],
    ),
    Shape(
        name="factory-before",
        body="""
        pos = torch.arange(x.shape[-1])
        h = self.b(self.a(x))
        return h + pos
        """,
        lines=["return h + pos.to(h.device)"],
    ),
    Shape(
        name="factory-before-used-twice",
        body="""
        pos = torch.arange(x.shape[-1])
        h = self.a(x) + pos
        h = self.b(h)
        return h + pos
        """,
        lines=[
            "pos = torch.arange(x.shape[-1], device=self.a.weight.device)",
            "return h + pos.to(h.device)",
        ],
    ),
    Shape(
        name="factory-inline",
        body="""
        h = self.b(self.a(x))
        return h + torch.arange(
            4,  # four
        )
        """,
        lines=[
            "4, device=h.device,  # four",
        ],
    ),
    Shape(
        name="factory-helper",
        body="""
        h = self.b(self.a(x))
        return h + causal(h)
        """,
        top="""
        def causal(h):
            n = h.shape[-1]
            return torch.ones(n)
        """,
        lines=["return h + causal(h).to(h.device)"],
    ),
    Shape(
        name="factory-helper-notensor",
        body="""
        h = self.b(self.a(x))
        return h + causal(4)
        """,
        top="""
        def causal(n):
            return torch.ones(n)
        """,
        lines=[
            "return h + causal(4).to(h.device)",
        ],
    ),
    Shape(
        name="factory-cuda",
        body="""
        h = self.b(self.a(x))
        m = torch.ones(4).cuda()
        return h * m
        """,
        lines=[
            "m = torch.ones(4).to(h.device)",
        ],
    ),
    Shape(
        name="factory-devcuda",
        body="""
        h = self.b(self.a(x))
        m = torch.ones(4, device='cuda')
        return h * m
        """,
        lines=[
            "m = torch.ones(4, device=h.device)",
        ],
    ),
    Shape(
        name="factory-dev0",
        body="""
        h = self.b(self.a(x))
        m = torch.ones(4, device=0, dtype=x.dtype)
        return h * m
        """,
        lines=[
            "m = torch.ones(4, device=h.device, dtype=x.dtype)",
        ],
    ),
    Shape(
        name="factory-to",
        body="""
        h = self.b(self.a(x))
        m = torch.ones(4).to('cuda:0')
        return h * m
        """,
        lines=[
            "m = torch.ones(4).to(h.device)",
        ],
    ),
    Shape(
        name="x.cuda",
        body="""
        h = self.b(x.cuda())
        return h.cuda() + h
        """,
        lines=[
            "return h + h",
        ],
    ),
    Shape(
        name="factory-tensor",
        body="""
        h = self.b(self.a(x))
        m = torch.tensor([1., 2., 3., 4.], device='cpu')
        return h * m
        """,
        lines=[
            "m = torch.tensor([1., 2., 3., 4.], device=h.device)",
        ],
    ),
    Shape(
        name="factory-follow",
        body="""
        m = torch.ones(4, device=x.device)
        h = self.b(self.a(x) * m)
        return h * m
        """,
        lines=[
            "return h * m.to(h.device)",
        ],
    ),
    Shape(
        name="table",
        body="""
        return self.b(x) + self.t
        """,
        init="""
        self.t = torch.ones(4)
        """,
        device_map={"": 1, "a": 0, "b": 1},
        lines=["return self.b(x) + self.t.to(self.b.weight.device)"],
    ),
    Shape(
        name="table-uncovered",
        body="""
        return self.b(x) + self.t
        """,
        init="""
        self.t = torch.ones(4)
        """,
        lines=["return self.b(x) + self.t.to(self.b.weight.device)"],
    ),
    Shape(
        name="table-list",
        body="""
        return self.b(x) + self.t[0]
        """,
        init="""
        self.t = [torch.ones(4)]
        """,
        lines=["return self.b(x) + self.t[0].to(self.b.weight.device)"],
    ),
    Shape(
        name="func-param",
        body="""
        h = self.b(self.a(x))
        return F.linear(h, self.a.weight)
        """,
        lines=[
            "return F.linear(h.to(self.a.weight.device), self.a.weight)",
        ],
    ),
    Shape(
        name="buffer-other",
        body="""
        h = self.b(self.a(x))
        return h + self.buf
        """,
        init="""
        self.register_buffer('buf', torch.ones(4))
        """,
        device_map={"a": 0, "b": 1, "buf": 0},
        lines=[
            "return h + self.buf.to(h.device)",
        ],
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_fault_is_cured_and_the_cure_proved(shape: Shape, tmp_path: Path) -> None:
    repairs = repair_shape(shape, tmp_path)
    assert [patch.reason for patch in repairs] == [""]
    assert repairs.proved
    assert changed(repairs) == shape.lines

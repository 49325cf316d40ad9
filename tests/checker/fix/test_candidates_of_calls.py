"""Repairs of operands of calls and closures, and calls that none is known for."""

from __future__ import annotations

from pathlib import Path

import pytest
from repairing import Shape, changed, repair_shape

SHAPES = [
    Shape(
        name="call-call",
        body="""
        return self.a(x) + self.b(x)
        """,
        lines=["return self.a(x).to(self.b.weight.device) + self.b(x)"],
    ),
    Shape(
        name="seq-anchor",
        body="""
        h = self.a(x)
        return h + self.b(self.b(h))
        """,
        lines=["return h.to(self.b.weight.device) + self.b(self.b(h))"],
    ),
    Shape(
        name="helper-call-anchor",
        body="""
        h = self.a(x)
        return h * self.step(h)
        """,
        methods="""
        def step(self, h):
            return self.b(h).relu()
        """,
        lines=[
            "step_output = self.step(h)",
            "return h.to(step_output.device) * step_output",
        ],
    ),
    Shape(
        name="closure",
        body="""
        h = self.b(self.a(x))
        def add(y):
            return y + x
        return add(h)
        """,
        lines=[
            "return y + x.to(y.device)",
        ],
    ),
    Shape(
        name="lambda",
        body="""
        h = self.b(self.a(x))
        f = lambda y: y * x
        return f(h)
        """,
        lines=[
            "f = lambda y: y * x.to(y.device)",
        ],
    ),
    Shape(
        name="dataclass",
        body="""
        s = State(x, self.b(self.a(x)))
        return s.first + s.second
        """,
        top="""
        from dataclasses import dataclass
        @dataclass
        class State:
            first: torch.Tensor
            second: torch.Tensor
        """,
        lines=[
            "return s.first.to(s.second.device) + s.second",
        ],
    ),
    Shape(
        name="moduledict",
        body="""
        h = self.a(x)
        for k in self.d:
            h = h + self.d[k](h)
        return h
        """,
        init="""
        self.d = nn.ModuleDict({'p': nn.Linear(4, 4), 'q': nn.Linear(4, 4)})
        """,
        device_map={"a": 0, "b": 1, "d.p": 0, "d.q": 1},
        lines=[
            "d_output = self.d[k](h)",
            "h = h.to(d_output.device) + d_output",
        ],
    ),
    Shape(
        name="loss-kw",
        body="""
        logits = self.b(self.a(x))
        labels = x.argmax(-1)
        return F.cross_entropy(logits, target=labels)
        """,
        train=True,
        lines=[
            "return F.cross_entropy(logits, target=labels.to(logits.device))",
        ],
    ),
    Shape(
        name="loss-mod",
        body="""
        logits = self.b(self.a(x))
        labels = x.argmax(-1)
        return self.loss(logits, labels)
        """,
        init="""
        self.loss = nn.CrossEntropyLoss()
        """,
        train=True,
        lines=[
            "return self.loss(logits, labels.to(logits.device))",
        ],
    ),
    Shape(
        name="lossfct",
        body="""
        logits = self.b(self.a(x))
        labels = x.argmax(-1)
        loss_fct = nn.CrossEntropyLoss()
        return loss_fct(logits.view(-1, 4), labels.view(-1))
        """,
        train=True,
        lines=[
            "return loss_fct(logits.view(-1, 4), labels.view(-1).to(logits.device))",
        ],
    ),
    Shape(
        name="walrus",
        body="""
        return (h := self.b(self.a(x))) + x
        """,
        lines=[
            "return (h := self.b(self.a(x))) + x.to(h.device)",
        ],
    ),
    Shape(
        name="walrus2",
        body="""
        return x + (h := self.b(self.a(x)))
        """,
        lines=[
            "h = self.b(self.a(x))",
            "return x.to(h.device) + h",
        ],
    ),
    Shape(
        name="elif",
        body="""
        h = self.b(self.a(x))
        if h.shape[0] > 100:
            return h
        elif torch.equal(h + x, h):
            return h
        return self.b(h)
        """,
        lines=[
            "elif torch.equal(h + x.to(h.device), h):",
        ],
    ),
    Shape(
        name="onelineif",
        body="""
        h = self.b(self.a(x))
        if h.shape[0]: return x + self.b(h)
        return self.b(h)
        """,
        lines=["if h.shape[0]: return x.to(self.b.weight.device) + self.b(h)"],
    ),
    Shape(
        name="checkpoint",
        body="""
        from torch.utils.checkpoint import checkpoint
        h = self.b(self.a(x))
        return checkpoint(self.blk, h, x, use_reentrant=False)
        """,
        methods="""
        def blk(self, h, x):
            return h.sigmoid() * x
        """,
        train=True,
        lines=[
            "return h.sigmoid() * x.to(h.device)",
        ],
    ),
    Shape(
        name="hook",
        body="""
        return self.b(self.a(x))
        """,
        init="""
        self.kept = []
        self.a.register_forward_hook(lambda mod, i, o: self.kept.append(o))
        self.b.register_forward_hook(self.mix)
        """,
        methods="""
        def mix(self, mod, i, o):
            return o + self.kept[-1]
        """,
        lines=[
            "return o + self.kept[-1].to(o.device)",
        ],
    ),
    Shape(
        name="nested-mod-anchor",
        body="""
        h = x
        for blk in [self.a, self.b]:
            h = h + blk(h)
        return h
        """,
        lines=["h = h.to(blk.weight.device) + blk(h)"],
    ),
    Shape(
        name="return-tuple",
        body="""
        h = self.a(x)
        p, q = self.two(h)
        return p * q
        """,
        methods="""
        def two(self, h):
            return h, self.b(h)
        """,
        lines=[
            "return p.to(q.device) * q",
        ],
    ),
    Shape(
        name="call-both-nonplain",
        body="""
        return self.f(x) + self.g(x)
        """,
        methods="""
        def f(self, x):
            return self.a(x).relu()
        def g(self, x):
            return self.b(x).relu()
        """,
        lines=[
            "f_output = self.f(x)",
            "g_output = self.g(x)",
            "return f_output.to(g_output.device) + g_output",
        ],
    ),
    Shape(
        name="in-while",
        body="""
        h = x
        n = 0
        h = self.a(h)
        while (h + self.f(h)).shape[0] > 0 and n < 2:
            n += 1
        return h
        """,
        methods="""
        def f(self, x):
            return self.b(x).relu()
        """,
        lines=[
            "while (h.to(self.b.weight.device) + self.f(h)).shape[0] > 0 and n < 2:",
        ],
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_a_fault_is_cured_and_the_cure_proved(shape: Shape, tmp_path: Path) -> None:
    repairs = repair_shape(shape, tmp_path)
    assert [patch.reason for patch in repairs] == [""]
    assert repairs.proved
    assert changed(repairs) == shape.lines


REFUSED = [
    Shape(
        name="module-whose-parameters-are-placed",
        body="""
        h = self.b(self.a(x))
        return self.head(h)
        """,
        init="""
        self.head = nn.Linear(4, 1)
        """,
        device_map={"a": 0, "b": 1, "head.weight": 0, "head.bias": 0},
        lines=[],
    ),
    Shape(
        name="partial",
        body="""
        h = self.b(self.a(x))
        return functools.partial(torch.add, other=x)(h)
        """,
        top="""
        import functools
        """,
        lines=[],
    ),
    Shape(
        name="map",
        body="""
        products = map(torch.mul, [self.a(x)], [self.b(x)])
        return torch.stack(list(products))
        """,
        lines=[],
    ),
    Shape(
        name="sum",
        body="""
        parts = [self.a(x), self.b(x)]
        return sum(parts)
        """,
        lines=[],
    ),
    Shape(
        name="custom-function",
        body="""
        h = self.a(x)
        return Mix.apply(h, self.b(h))
        """,
        top="""
        class Mix(torch.autograd.Function):
            @staticmethod
            def forward(ctx, h, g):
                ctx.save_for_backward(h, g)
                return h.to(g.device) * g

            @staticmethod
            def backward(ctx, grad):
                h, g = ctx.saved_tensors
                return grad * g, grad * h.to(grad.device)
        """,
        train=True,
        lines=[],
    ),
]


@pytest.mark.parametrize("shape", REFUSED, ids=lambda shape: shape.name)
def test_what_has_no_cure_is_refused_in_words(shape: Shape, tmp_path: Path) -> None:
    repairs = repair_shape(shape, tmp_path)
    assert not repairs.patches
    assert repairs.uncured
    assert all(reason for _, reason in repairs.uncured)

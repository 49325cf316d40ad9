"""Repairs of small models, each proved: operands of operations, calls and closures."""

from __future__ import annotations

from pathlib import Path

import pytest
from repairing import Shape, changed, read_shapes, repair_shape

OPERATIONS = """
    residual
        return x + self.b(self.a(x))
        + return x.to(self.b.weight.device) + self.b(self.a(x))

    aug
        h = self.b(self.a(x))
        h += x
        return h
        + h += x.to(h.device)

    aug2
        x = self.a(x)
        x *= self.b(x)
        return x
        + x *= self.b(x).to(x.device)

    inplace-index
        h = self.b(self.a(x))
        m = x[:, 0] > 0
        h[m] = self.a(x)[m]
        return h
        + h[m.to(h.device)] = self.a(x)[m].to(h.device)

    inplace-index2
        h = self.b(self.a(x))
        idx = torch.zeros(2, dtype=torch.long).to(x.device)
        h[idx] = 1.0
        return h
        + h[idx.to(h.device)] = 1.0

    gather
        h = self.b(self.a(x))
        i = x.argmax(-1, keepdim=True)
        return h.gather(-1, i) + h[i.view(-1) % 3]
        + return h.gather(-1, i.to(h.device)) + h[(i.view(-1) % 3).to(h.device)]

    where
        h = self.b(self.a(x))
        return torch.where(x > 0, h, torch.zeros_like(x))
        + result = x > 0
        + return torch.where(result, h.to(result.device), torch.zeros_like(x))

    ifexp
        h = self.b(self.a(x))
        return (x if h.shape[0] > 1 else x) + h
        + return (x if h.shape[0] > 1 else x).to(h.device) + h

    minus
        h = self.b(self.a(x))
        return -x @ h.T + (x - 1) @ h.T
        + return (-x).to(h.device) @ h.T + (x - 1).to(h.device) @ h.T

    masked_scatter
        h = self.a(x)
        f = self.b(x)
        mask = h > 0
        return h.masked_scatter(mask, f)
        + return h.masked_scatter(mask, f.to(h.device))

    same-twice
        h = self.b(self.a(x))
        return (h + x) * (x + h)
        + return (h + x.to(h.device)) * (x.to(h.device) + h)

    method
        h = self.b(self.a(x))
        return h.add(x).mul(other=x)
        + return h.add(x.to(h.device)).mul(other=x.to(h.device))

    out
        h = self.b(self.a(x))
        w = torch.einsum('bi,bi->b', x, h)
        return w
        + w = torch.einsum('bi,bi->b', x.to(h.device), h)

    clamp
        h = self.b(self.a(x))
        return torch.minimum(x, h)
        + return torch.minimum(x.to(h.device), h)

    two-wrong
        h = self.b(self.a(x))
        z = self.a(x)
        return torch.addcmul(h, x, z)
        + return torch.addcmul(h.to(x.device), x, z)
"""

CALLS_AND_CLOSURES = """
    call-call
        return self.a(x) + self.b(x)
        + return self.a(x).to(self.b.weight.device) + self.b(x)

    seq-anchor
        h = self.a(x)
        return h + self.b(self.b(h))
        + return h.to(self.b.weight.device) + self.b(self.b(h))

    helper-call-anchor
        methods:
            def step(self, h):
                return self.b(h).relu()
        forward:
            h = self.a(x)
            return h * self.step(h)
        + step_output = self.step(h)
        + return h.to(step_output.device) * step_output

    closure
        h = self.b(self.a(x))
        def add(y):
            return y + x
        return add(h)
        + return y + x.to(y.device)

    lambda
        h = self.b(self.a(x))
        f = lambda y: y * x
        return f(h)
        + f = lambda y: y * x.to(y.device)

    dataclass
        top:
            from dataclasses import dataclass
            @dataclass
            class State:
                first: torch.Tensor
                second: torch.Tensor
        forward:
            s = State(x, self.b(self.a(x)))
            return s.first + s.second
        + return s.first.to(s.second.device) + s.second

    moduledict
        map: {"a": 0, "b": 1, "d.p": 0, "d.q": 1}
        init:
            self.d = nn.ModuleDict({'p': nn.Linear(4, 4), 'q': nn.Linear(4, 4)})
        forward:
            h = self.a(x)
            for k in self.d:
                h = h + self.d[k](h)
            return h
        + d_output = self.d[k](h)
        + h = h.to(d_output.device) + d_output

    loss-kw (train)
        logits = self.b(self.a(x))
        labels = x.argmax(-1)
        return F.cross_entropy(logits, target=labels)
        + return F.cross_entropy(logits, target=labels.to(logits.device))

    loss-mod (train)
        init:
            self.loss = nn.CrossEntropyLoss()
        forward:
            logits = self.b(self.a(x))
            labels = x.argmax(-1)
            return self.loss(logits, labels)
        + return self.loss(logits, labels.to(logits.device))

    lossfct (train)
        logits = self.b(self.a(x))
        labels = x.argmax(-1)
        loss_fct = nn.CrossEntropyLoss()
        return loss_fct(logits.view(-1, 4), labels.view(-1))
        + return loss_fct(logits.view(-1, 4), labels.view(-1).to(logits.device))

    walrus
        return (h := self.b(self.a(x))) + x
        + return (h := self.b(self.a(x))) + x.to(h.device)

    walrus2
        return x + (h := self.b(self.a(x)))
        + h = self.b(self.a(x))
        + return x.to(h.device) + h

    elif
        h = self.b(self.a(x))
        if h.shape[0] > 100:
            return h
        elif torch.equal(h + x, h):
            return h
        return self.b(h)
        + elif torch.equal(h + x.to(h.device), h):

    onelineif
        h = self.b(self.a(x))
        if h.shape[0]: return x + self.b(h)
        return self.b(h)
        + if h.shape[0]: return x.to(self.b.weight.device) + self.b(h)

    checkpoint (train)
        methods:
            def blk(self, h, x):
                return h.sigmoid() * x
        forward:
            from torch.utils.checkpoint import checkpoint
            h = self.b(self.a(x))
            return checkpoint(self.blk, h, x, use_reentrant=False)
        + return h.sigmoid() * x.to(h.device)

    hook
        init:
            self.kept = []
            self.a.register_forward_hook(lambda mod, i, o: self.kept.append(o))
            self.b.register_forward_hook(self.mix)
        methods:
            def mix(self, mod, i, o):
                return o + self.kept[-1]
        forward:
            return self.b(self.a(x))
        + return o + self.kept[-1].to(o.device)

    nested-mod-anchor
        h = x
        for blk in [self.a, self.b]:
            h = h + blk(h)
        return h
        + h = h.to(blk.weight.device) + blk(h)

    return-tuple
        methods:
            def two(self, h):
                return h, self.b(h)
        forward:
            h = self.a(x)
            p, q = self.two(h)
            return p * q
        + return p.to(q.device) * q

    call-both-nonplain
        methods:
            def f(self, x):
                return self.a(x).relu()
            def g(self, x):
                return self.b(x).relu()
        forward:
            return self.f(x) + self.g(x)
        + f_output = self.f(x)
        + g_output = self.g(x)
        + return f_output.to(g_output.device) + g_output

    in-while
        methods:
            def f(self, x):
                return self.b(x).relu()
        forward:
            h = x
            n = 0
            h = self.a(h)
            while (h + self.f(h)).shape[0] > 0 and n < 2:
                n += 1
            return h
        + while (h.to(self.b.weight.device) + self.f(h)).shape[0] > 0 and n < 2:
"""

CURED = read_shapes(OPERATIONS, CALLS_AND_CLOSURES)


@pytest.mark.parametrize("shape", CURED, ids=lambda shape: shape.name)
def test_a_fault_is_cured_and_the_cure_proved(shape: Shape, tmp_path: Path) -> None:
    repairs = repair_shape(shape, tmp_path)
    assert [patch.reason for patch in repairs] == [""]
    assert repairs.proved
    assert changed(repairs) == shape.lines


NOT_CURED = """
    module-whose-parameters-are-placed
        map: {"a": 0, "b": 1, "head.weight": 0, "head.bias": 0}
        init:
            self.head = nn.Linear(4, 1)
        forward:
            h = self.b(self.a(x))
            return self.head(h)

    partial
        top:
            import functools
        forward:
            h = self.b(self.a(x))
            return functools.partial(torch.add, other=x)(h)

    map
        products = map(torch.mul, [self.a(x)], [self.b(x)])
        return torch.stack(list(products))

    sum
        parts = [self.a(x), self.b(x)]
        return sum(parts)

    custom-function (train)
        top:
            class Mix(torch.autograd.Function):
                @staticmethod
                def forward(ctx, h, g):
                    ctx.save_for_backward(h, g)
                    return h.to(g.device) * g
                @staticmethod
                def backward(ctx, grad):
                    h, g = ctx.saved_tensors
                    return grad * g, grad * h.to(grad.device)
        forward:
            h = self.a(x)
            return Mix.apply(h, self.b(h))
"""


@pytest.mark.parametrize("shape", read_shapes(NOT_CURED), ids=lambda shape: shape.name)
def test_what_has_no_cure_is_refused_in_words(shape: Shape, tmp_path: Path) -> None:
    repairs = repair_shape(shape, tmp_path)
    assert not repairs.patches
    assert repairs.uncured
    assert all(reason for _, reason in repairs.uncured)

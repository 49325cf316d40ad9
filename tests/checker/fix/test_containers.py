"""Repairs of small models, each proved: lists, dicts, and what is made or kept elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from repairing import Shape, changed, read_shapes, repair_shape

LISTS = """
    cat-lit
        h = self.a(x)
        g = self.b(h)
        return torch.cat([h, g, h], dim=-1)
        + return torch.cat([h, g.to(h.device), h], dim=-1)

    cat-star
        rest = [self.a(x), self.b(x)]
        g = self.b(x)
        return torch.cat([g, *rest], dim=-1)
        + return torch.cat([g, *[each.to(g.device) for each in rest]], dim=-1)

    cat-comp
        return torch.cat([f(x) for f in (self.a, self.b)], dim=-1)
        + parts = [f(x) for f in (self.a, self.b)]
        + return torch.cat([each.to(parts[-1].device) for each in parts], dim=-1)

    cat-tuple-gen
        return torch.cat(tuple(f(x) for f in (self.a, self.b)), dim=-1)
        + parts = tuple(f(x) for f in (self.a, self.b))
        + return torch.cat([each.to(parts[-1].device) for each in parts], dim=-1)

    cat-dict
        d = {'a': self.a(x), 'b': self.b(x)}
        return torch.stack(list(d.values()))
        + parts = list(d.values())
        + return torch.stack([each.to(parts[-1].device) for each in parts])

    cat-call
        methods:
            def all(self, x):
                return [self.a(x), self.b(x)]
        forward:
            return torch.stack(self.all(x))
        + parts = list(self.all(x))
        + return torch.stack([each.to(parts[-1].device) for each in parts])

    cat-slice
        ps = [self.a(x), self.a(x), self.b(x)]
        return torch.cat(ps[1:], dim=0)
        + parts = ps[1:]
        + return torch.cat([each.to(parts[-1].device) for each in parts], dim=0)

    cat-plus
        ps = [self.a(x), self.b(x)]
        return torch.cat([x] + ps, dim=0)
        + parts = [x] + ps
        + return torch.cat([each.to(parts[0].device) for each in parts], dim=0)

    compare
        h = self.b(self.a(x))
        return (h > x).float()
        + return (h > x.to(h.device)).float()

    comp-elt
        h = self.b(self.a(x))
        return torch.stack([h[i] + x[i] for i in range(len(h))])
        + return torch.stack([h[i] + x[i].to(h.device) for i in range(len(h))])
"""

DICTS = """
    keywords
        h = self.b(self.a(x))
        words = {'weight': self.a.weight, 'bias': self.b.bias}
        return F.linear(h, **words)
        + return F.linear(h, **{**words, 'weight': words['weight'].to(h.device)})

    keywords-two
        h = self.b(self.a(x))
        words = {'weight': self.a.bias, 'bias': self.a.weight[0]}
        return F.batch_norm(h, self.b.bias, self.b.bias ** 2, **words)
        + return F.batch_norm(h, self.b.bias, self.b.bias ** 2, **{**words, 'weight': \
words['weight'].to(h.device), 'bias': words['bias'].to(h.device)})

    keywords-stay
        words = {'tensor1': self.b(x), 'tensor2': self.a(x), 'value': 2}
        return torch.addcmul(self.b(x), **words)
        + return torch.addcmul(self.b(x), **{**words, 'tensor2': \
words['tensor2'].to(self.b.weight.device)})

    keywords-display
        h = self.b(self.a(x))
        return F.linear(h, **{'weight': self.a.weight, 'bias': self.b.bias})
        + return F.linear(h, **{'weight': self.a.weight.to(h.device), 'bias': self.b.bias})

    keywords-nested
        h = self.b(self.a(x))
        rest = {'weight': self.a.weight}
        return F.linear(h, **{'bias': self.b.bias, **rest})
        + result = {'bias': self.b.bias, **rest}
        + return F.linear(h, **{**result, 'weight': result['weight'].to(h.device)})

    keywords-call
        methods:
            def words(self):
                return {'weight': self.a.weight, 'bias': self.b.bias}
        forward:
            h = self.b(self.a(x))
            return F.linear(h, **self.words())
        + words_output = self.words()
        + return F.linear(h, **{**words_output, 'weight': words_output['weight'].to(h.device)})
"""

MADE_OR_KEPT_ELSEWHERE = """
    layer-made-in-forward
        h = self.b(x)
        return nn.LayerNorm(h.shape[-1])(h)
        + return nn.LayerNorm(h.shape[-1], device=h.device)(h)

    numpy
        h = self.b(x)
        return h * float(h.detach().numpy().max())
        + return h * float(h.detach().to("cpu").numpy().max())

    factory-arange
        h = self.b(self.a(x))
        pos = torch.arange(4)
        return h + pos
        + pos = torch.arange(4, device=h.device)

    factory-before
        pos = torch.arange(x.shape[-1])
        h = self.b(self.a(x))
        return h + pos
        + return h + pos.to(h.device)

    factory-before-used-twice
        pos = torch.arange(x.shape[-1])
        h = self.a(x) + pos
        h = self.b(h)
        return h + pos
        + pos = torch.arange(x.shape[-1], device=self.a.weight.device)
        + return h + pos.to(h.device)

    factory-inline
        h = self.b(self.a(x))
        return h + torch.arange(
            4,  # four
        )
        + 4, device=h.device,  # four

    factory-helper
        top:
            def causal(h):
                n = h.shape[-1]
                return torch.ones(n)
        forward:
            h = self.b(self.a(x))
            return h + causal(h)
        + return h + causal(h).to(h.device)

    factory-helper-notensor
        top:
            def causal(n):
                return torch.ones(n)
        forward:
            h = self.b(self.a(x))
            return h + causal(4)
        + return h + causal(4).to(h.device)

    factory-cuda
        h = self.b(self.a(x))
        m = torch.ones(4).cuda()
        return h * m
        + m = torch.ones(4).to(h.device)

    factory-devcuda
        h = self.b(self.a(x))
        m = torch.ones(4, device='cuda')
        return h * m
        + m = torch.ones(4, device=h.device)

    factory-dev0
        h = self.b(self.a(x))
        m = torch.ones(4, device=0, dtype=x.dtype)
        return h * m
        + m = torch.ones(4, device=h.device, dtype=x.dtype)

    factory-to
        h = self.b(self.a(x))
        m = torch.ones(4).to('cuda:0')
        return h * m
        + m = torch.ones(4).to(h.device)

    x.cuda
        h = self.b(x.cuda())
        return h.cuda() + h
        + return h + h

    factory-tensor
        h = self.b(self.a(x))
        m = torch.tensor([1., 2., 3., 4.], device='cpu')
        return h * m
        + m = torch.tensor([1., 2., 3., 4.], device=h.device)

    factory-follow
        m = torch.ones(4, device=x.device)
        h = self.b(self.a(x) * m)
        return h * m
        + return h * m.to(h.device)

    table
        map: {"": 1, "a": 0, "b": 1}
        init:
            self.t = torch.ones(4)
        forward:
            return self.b(x) + self.t
        + return self.b(x) + self.t.to(self.b.weight.device)

    table-uncovered
        init:
            self.t = torch.ones(4)
        forward:
            return self.b(x) + self.t
        + return self.b(x) + self.t.to(self.b.weight.device)

    table-list
        init:
            self.t = [torch.ones(4)]
        forward:
            return self.b(x) + self.t[0]
        + return self.b(x) + self.t[0].to(self.b.weight.device)

    func-param
        h = self.b(self.a(x))
        return F.linear(h, self.a.weight)
        + return F.linear(h.to(self.a.weight.device), self.a.weight)

    buffer-other
        map: {"a": 0, "b": 1, "buf": 0}
        init:
            self.register_buffer('buf', torch.ones(4))
        forward:
            h = self.b(self.a(x))
            return h + self.buf
        + return h + self.buf.to(h.device)
"""

CURED = read_shapes(LISTS, DICTS, MADE_OR_KEPT_ELSEWHERE)


@pytest.mark.parametrize("shape", CURED, ids=lambda shape: shape.name)
def test_a_fault_is_cured_and_the_cure_proved(shape: Shape, tmp_path: Path) -> None:
    repairs = repair_shape(shape, tmp_path)
    assert [patch.reason for patch in repairs] == [""]
    assert repairs.proved
    assert changed(repairs) == shape.lines

"""Sums over a stage's boundary: residuals, skips and running sums."""

import torch
import torch.nn.functional as F
from torch import nn
from seeded import case


# case: fault_residual_cut
"""A vision block that is cut in its middle: attention on one card, the MLP on the next.

`x + self.mlp(...)` adds the residual on cuda:0 to what comes from cuda:1.
"""


class VisionAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.proj((q @ k.mT).softmax(-1) @ v)


class VisionBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = VisionAttention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # fault: mixed-devices


class Tower(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.patch_embed = nn.Linear(12, width)
        self.blocks = nn.ModuleList(VisionBlock(width) for _ in range(3))

    def forward(self, patches):
        x = self.patch_embed(patches)
        for block in self.blocks:
            x = block(x)
        return x


case(
    Tower,
    {
        "patch_embed": 0,
        "blocks.0": 0,
        "blocks.1.norm1": 0,
        "blocks.1.attn": 0,
        "blocks.1.norm2": 0,
        "blocks.1.mlp": 1,
        "blocks.2": 1,
    },
    [(2, 5, 12)],
)


# case: fault_decorated_residual
"""A decorator adds the residual around every sublayer method.

The wrapper's addition mixes cards where the wrapped method calls a module that is placed elsewhere.
"""

from functools import wraps


def residual(method):
    @wraps(method)
    def wrapper(self, x, *args):
        return x + method(self, x, *args)  # fault: mixed-devices

    return wrapper


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.mixer = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU())

    @residual
    def mix(self, x):
        return self.mixer(x)

    @residual
    def feed_forward(self, x, gain):
        return gain * self.mlp(x)

    def forward(self, x):
        return self.feed_forward(self.mix(self.stem(x)), 0.5)


case(Model, {"stem": "cuda:0", "mixer": "cuda:0", "mlp": "cuda:1"}, [(2, 6)])


# case: helper_residuals
"""What `fault_helper_in_another_file` imports."""


def add_residual(branch, residual, *, scale=1.0):
    if scale != 1.0:
        branch = branch * scale
    return torch.add(residual, branch)  # fault: mixed-devices


def pooled(states, mask):
    weight = mask.to(states.device, states.dtype).unsqueeze(-1)
    return (states * weight).sum(1) / weight.sum(1)


# case: fault_helper_in_another_file
"""The residual is added by a helper in another file.

The long skip comes from the embedding on cuda:0, the branch from cuda:1; the fault stands in the
helper. The other helper of that file moves its mask and is fine.
"""

from helper_residuals import add_residual, pooled


class LongSkip(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, ids):
        skip = self.embed(ids)
        h = self.encoder(skip)
        h = add_residual(h, skip, scale=0.5)
        return pooled(h, ids != 0)


HELPERS = ("helper_residuals.py",)
case(
    LongSkip,
    {"embed": "cuda:0", "encoder": "cuda:1"},
    lambda: {"ids": torch.randint(1, 20, (2, 4))},
)


# case: fault_iadd_hidden
"""Deep prompts are added in place: `h += block(h)` where the block is on another card.

The target is the embedding's output on cuda:0, what is added comes from cuda:1.
"""


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x):
        return self.fc(x)


class InPlace(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.ModuleList([Mlp(width), Mlp(width)])
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        h = self.embed(ids)
        for block in self.blocks:
            h += block(h)  # fault: in-place
        return self.norm(h)


case(
    InPlace,
    {"embed": 0, "blocks.0": 0, "blocks.1": 1, "norm": 1},
    lambda: (torch.randint(0, 16, (2, 3)),),
)


# case: fault_add_method
"""A wide-and-deep recommender that sums its logits with `add_`.

The wide part's logits are the target, on cuda:0; the deep part's come from cuda:1.
"""


class WideAndDeep(nn.Module):
    def __init__(self, items=40):
        super().__init__()
        self.wide = nn.EmbeddingBag(items, 1, mode="sum")
        self.table = nn.EmbeddingBag(items, 8, mode="mean")
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, items):
        logits = self.wide(items)
        logits.add_(self.deep(self.table(items)))  # fault: in-place
        return logits.sigmoid()


case(WideAndDeep, {"wide": 0, "table": 0, "deep": 1}, lambda: (torch.randint(0, 40, (4, 5)),))


# case: fault_accumulate
"""Running sums of layer outputs with `itertools.accumulate`, which calls `torch.add` in C."""

from itertools import accumulate


class Dense(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        outputs = [layer(x) for layer in self.layers]
        sums = list(accumulate(outputs, torch.add))  # fault: mixed-devices
        return sums[-1]


case(Dense, {"layers.0": 0, "layers.1": 0, "layers.2": 1}, [(2, 4)])


# case: fault_reduce_add
"""Branches of an Inception-like block are added with `functools.reduce(torch.add, ...)`.

The call of `torch.add` is made by `reduce`, in C; the line that mixes cards is the one with
`reduce`.
"""

from functools import reduce


class Branches(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 1)
        self.branches = nn.ModuleList(
            nn.Conv2d(width, width, size, padding=size // 2) for size in (1, 3, 5)
        )

    def forward(self, x):
        x = self.stem(x)
        outputs = [branch(x) for branch in self.branches]
        return reduce(torch.add, outputs).relu()  # fault: mixed-devices


case(Branches, {"stem": 0, "branches.0": 0, "branches.1": 0, "branches.2": 1}, [(1, 3, 6, 6)])


# case: fault_generator_sum
"""A weighted sum of layer outputs through a generator expression.

The mixing weights lie on cuda:0; the second half of the outputs comes from cuda:1. The product
stands inside the generator and fails there. Python's `sum` then adds what is on cuda:0 to what the
products of cuda:1 give.
"""


class LayerPool(nn.Module):
    def __init__(self, width=6, depth=4):
        super().__init__()
        self.mix = nn.Parameter(torch.full((depth,), 0.25))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        states = []
        for layer in self.layers:
            x = layer(x).tanh()
            states.append(x)
        mix = self.mix.softmax(0)
        return sum(w * state for w, state in zip(mix, states, strict=True))  # fault: mixed-devices


case(LayerPool, {"mix": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1}, [(2, 6)])


# case: fault_followup
"""A mixed sum, and a write that fails only because of where the check went on.

`left + right` mixes cuda:0 and cuda:1; the module entered last is on cuda:1, so there it goes on.
The write into `base` on cuda:0 then takes that sum from cuda:1: settled on cuda:0, all is well.
"""


class Audit(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        base = torch.zeros_like(x)
        left = self.left(x)
        right = self.right(left)
        both = left + right  # fault: mixed-devices
        base.add_(both)  # followup
        return self.last(base)


case(Audit, {"left": 0, "right": 1, "last": 1}, [(2, 5)])


# case: fault_multiline_operators
"""Sums and chains over many lines; Python names the line on which the operation begins."""


class Sums(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.c = nn.Linear(width, width)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        total = (
            a.abs() * 0.5  # fault: mixed-devices
            + b.abs()
        )
        return self.c(
            total,
        ) + torch.mul(
            torch.relu(
                a,
            ),
            2.0,
        ).to(
            b.device,
        )


case(Sums, {"a": 0, "b": 1, "c": 1}, [(2, 4)])


# case: clean_partial_and_reduce
"""`functools.partial` and `reduce` over tensors that are brought together first."""

from functools import partial, reduce


class Branches(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.activation = partial(F.leaky_relu, negative_slope=0.2)
        self.branches = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        outputs = [self.activation(branch(x)) for branch in self.branches]
        home = outputs[0].device
        total = reduce(torch.add, (output.to(home) for output in outputs))
        return self.out(total), sum(output.mean().item() for output in outputs)


case(
    Branches,
    {"branches.0": 0, "branches.1": 1, "branches.2": 0, "branches.3": 1, "out": 1},
    [(2, 4)],
)

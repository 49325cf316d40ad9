"""Parameters, buffers and modules that several stages use."""

import torch
import torch.nn.functional as F
from torch import nn
from seeded import case


# case: fault_buffer_of_another_stage
"""A learned-frequency buffer of the embedding stage is read again by the last stage.

`bands` is a buffer placed on cuda:0; the output of the decoder is on cuda:1.
"""


class Encoding(nn.Module):
    def __init__(self, num_bands):
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(num_bands))

    def forward(self, x):
        angles = x[..., None] * self.bands
        return torch.cat((angles.sin(), angles.cos()), -1).flatten(-2)


class RadianceField(nn.Module):
    def __init__(self, num_bands=4):
        super().__init__()
        self.encoding = Encoding(num_bands)
        self.field = nn.Sequential(nn.Linear(6 * num_bands, 16), nn.ReLU())
        self.out = nn.Linear(16, num_bands)

    def forward(self, points):
        amplitude = self.out(self.field(self.encoding(points)))
        return (amplitude / self.encoding.bands).sum(-1)  # fault: mixed-devices


case(
    RadianceField,
    {"encoding": "cuda:0", "field": "cuda:0", "out": "cuda:1"},
    lambda: {"points": torch.rand(7, 3)},
)


# case: fault_parameter_of_another_stage
"""The last stage scales with the first layer's learned gain.

`self.layers[0].gain` is a parameter on cuda:0, the states are on cuda:1 by then.
"""


class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return self.gain * self.fc(x)


class Net(nn.Module):
    def __init__(self, width=7, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Scaled(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x / self.layers[0].gain  # fault: mixed-devices
        return self.out(x)


case(Net, {"layers.0": 0, "layers.1": 1, "layers.2": 1, "out": 1}, [(2, 7)])


# case: fault_tied_linear
"""A GPT that ties its head by hand: `F.linear` with the embedding's weight.

The last hidden states are on cuda:1, the tied weight on cuda:0.
"""


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class TiedGPT(nn.Module):
    def __init__(self, vocab=50, width=16, depth=2):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.h = nn.ModuleList(Block(width) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)  # fault: mixed-devices


PLACEMENT = {"wte": "cuda:0", "h.0": "cuda:0", "h.1": "cuda:1", "ln_f": "cuda:1"}
build = TiedGPT


def inputs():
    return (torch.randint(0, 50, (1, 6)),)


# case: fault_functional_embedding
"""Token types are looked up in the word table once more, by the last stage.

The ids move to cuda:1 as an argument of the placed module, the table is a parameter on cuda:0.
"""


class Reader(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self._words = (words,)  # in a tuple, so that it isn't registered twice
        self.mix = nn.Linear(2 * width, width)

    def forward(self, h, ids):
        again = F.embedding(ids, self._words[0].weight)  # fault: mixed-devices
        return self.mix(torch.cat((h, again), dim=-1))


class Highway(nn.Module):
    def __init__(self, vocab=20, width=8):
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.reader = Reader(self.words, width)

    def forward(self, ids):
        h, _ = self.body(self.words(ids))
        return self.reader(h, ids)


case(Highway, {"words": 0, "body": 0, "reader": 1}, lambda: (torch.randint(0, 20, (2, 4)),))


# case: fault_shared_layer_norm
"""The final norm reuses the first norm's weight through `F.layer_norm`.

The weight and bias lie on cuda:0 with the first norm, the states on cuda:1.
"""


class SharedNorm(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.encoder = nn.Linear(width, width)
        self.decoder = nn.Linear(width, width)

    def forward(self, x):
        h = self.encoder(self.norm(x))
        h = self.decoder(h.relu())
        shape = self.norm.normalized_shape
        return F.layer_norm(h, shape, self.norm.weight, self.norm.bias)  # fault: mixed-devices


case(SharedNorm, {"norm": 0, "encoder": 0, "decoder": 1}, [(3, 10)])


# case: fault_moving_average_buffer
"""A moving average kept at the model's root is updated with statistics of the last stage.

`lerp_` writes into a buffer on cuda:0 what was computed on cuda:1.
"""


class Tracked(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.register_buffer("average", torch.zeros(width))
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x):
        h = self.second(self.first(x).relu())
        with torch.no_grad():
            self.average.lerp_(h.mean(0), 0.1)  # fault: in-place
        return h.square().mean()


case(Tracked, {"average": 0, "first": 0, "second": 1}, [(4, 6)], train=True)


# case: fault_lora_addmm
"""LoRA whose low-rank matrices live in one dictionary at the model's root.

Adapters were added later and placed on cuda:0 as a whole; the second projection runs on cuda:1,
and `addmm` mixes its output with what the adapter gives on cuda:0.
"""


class LoraNet(nn.Module):
    def __init__(self, width=12, rank=2):
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)
        self.down = nn.ParameterDict({n: torch.randn(width, rank) for n in ("fc1", "fc2")})
        self.up = nn.ParameterDict({n: torch.zeros(rank, width) for n in ("fc1", "fc2")})
        self.scaling = 0.5

    def adapted(self, name, x):
        base = getattr(self, name)(x)
        low = x @ self.down[name]
        return torch.addmm(base, low, self.up[name], alpha=self.scaling)  # fault: mixed-devices

    def forward(self, x):
        h = self.adapted("fc1", x)
        return {"loss": self.adapted("fc2", h.relu()).pow(2).mean()}


case(LoraNet, {"fc1": 0, "fc2": 1, "down": 0, "up": 0}, [(4, 12)], train=True)


# case: fault_einsum_biaffine
"""A biaffine parser: heads and dependents come from two encoders on two cards.

The first `einsum` takes the dependents (cuda:0) and the weight (cuda:1); its result, once that is
settled on cuda:1, meets the heads there.
"""


class Biaffine(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.dependent = nn.Linear(12, width)
        self.head = nn.Linear(12, width)
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, words):
        dependents = self.dependent(words).tanh()
        heads = self.head(words).tanh()
        left = torch.einsum("bid,de->bie", dependents, self.weight)  # fault: mixed-devices
        return torch.einsum("bie,bje->bij", left, heads)


case(Biaffine, {"dependent": 0, "head": 1, "weight": 1}, [(2, 5, 12)])


# case: fault_both_directions
"""A helper that is right for no side: it is called with cuda:0 first, and with cuda:1 first."""


def gate(value, by):
    return value * by.sigmoid()  # fault: mixed-devices


class Crossed(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        left, right = self.left(x), self.right(x)
        first, second = gate(left, right), gate(right, left)
        return self.out(first), self.out(second)


case(Crossed, {"left": 0, "right": 1, "out": 1}, [(2, 4)])


# case: clean_shared_module
"""ALBERT's one layer under three names, and a module that is used from two places."""


class Albert(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        shared = nn.TransformerEncoderLayer(width, 2, 8, 0.0, batch_first=True)
        self.layers = nn.ModuleList([shared] * 3)
        self.embed = nn.Embedding(9, width)
        self.pool, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, ids):
        h = self.norm(self.embed(ids))
        for layer in self.layers:
            h = layer(h)
        return self.pool(self.norm(h).to(h.device))


case(
    Albert,
    {
        "embed": 0,
        "norm": 0,
        "layers.0": 1,
        "layers.1": 1,
        "layers.2": 1,
        "pool": 1,
    },
    lambda: (torch.randint(0, 9, (2, 3)),),
)


# case: clean_tied_on_one_device
"""A tied head on its partner's card: the last stage goes back to the first card."""


class Tied(nn.Module):
    def __init__(self, vocab=20, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.body = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        logits = self.head(self.body(self.embed(ids)))
        target = torch.roll(ids, -1, 1)
        return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


case(
    Tied,
    {"embed": "cuda:0", "body": "cuda:1", "head": "cuda:0"},
    lambda: (torch.randint(0, 20, (2, 5)),),
    train=True,
)


# case: clean_dynamic_modules
"""Subclasses of `nn.ModuleList` and `nn.Sequential`, and modules in dictionaries."""


class Tower(nn.ModuleList):
    def forward(self, x):
        for layer in self:
            x = layer(x).relu()
        return x


class Gated(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * torch.sigmoid(self[-1].bias)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.tower = Tower(nn.Linear(width, width) for _ in range(3))
        self.gated = Gated(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.routes = {"a": self.tower, "b": self.gated}

    def forward(self, x, route="a"):
        for name in (route, "b"):
            x = self.routes[name](x)
        return x


case(Model, {"tower.0": 0, "tower.1": 0, "tower.2": 1, "gated": 1}, {"x": (2, 4)})

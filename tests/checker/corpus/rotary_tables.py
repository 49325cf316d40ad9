"""Rotary and sinusoidal positions, and the tables that they are read from."""

import torch
from torch import nn
from seeded import case


# case: fault_arange_rotary
"""Rotary angles from positions that are counted on the CPU.

`inv_freq` is a buffer on each layer's card; `torch.outer` multiplies it with CPU positions.
"""


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        inv_freq = 1.0 / base ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, length):
        t = torch.arange(length).float()
        angles = torch.outer(t, self.inv_freq)  # fault: mixed-devices
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.rotary = Rotary(width)
        self.qk = nn.Linear(width, 2 * width, bias=False)
        self.v = nn.Linear(width, width, bias=False)

    def forward(self, x):
        cos, sin = self.rotary(x.shape[1])
        q, k = (y * cos + rotate_half(y) * sin for y in self.qk(x).chunk(2, dim=-1))
        return x + (q @ k.transpose(1, 2)).softmax(-1) @ self.v(x)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


case(Stack, {"layers.0": 0, "layers.1": 1, "layers.2": 1}, {"x": (1, 5, 8)})


# case: fault_complex_rotary
"""Rotary factors as complex numbers in a plain attribute, multiplied as Llama's first code did."""


def factors(dim, length):
    angles = torch.outer(torch.arange(length), 100.0 ** (-torch.arange(0, dim, 2) / dim))
    return torch.polar(torch.ones_like(angles), angles)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.freqs_cis = factors(width, 16)
        self.wq, self.wv = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        pairs = torch.view_as_complex(self.wq(x).unflatten(-1, (-1, 2)))
        turned = pairs * self.freqs_cis[: x.shape[1]]  # fault: mixed-devices
        q = torch.view_as_real(turned).flatten(-2)
        return x + (q @ q.mT).softmax(-1) @ self.wv(x)


case(lambda: nn.Sequential(Attention(4), Attention(4)), {"0": 0, "1": 1}, [(1, 3, 4)])


# case: fault_from_numpy_sinusoid
"""Sinusoidal positions computed with numpy in every forward.

`torch.from_numpy` makes a CPU tensor, which is added to GPU embeddings.
"""

import numpy as np


def sinusoid(length, width):
    position = np.arange(length, dtype=np.float32)[:, None]
    rate = np.exp(-np.float32(np.log(10000.0)) * np.arange(0, width, 2, dtype=np.float32) / width)
    return np.concatenate([np.sin(position * rate), np.cos(position * rate)], axis=1)


class Transcriber(nn.Module):
    def __init__(self, mels=8, width=16):
        super().__init__()
        self.conv = nn.Conv1d(mels, width, 3, padding=1)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 5)

    def forward(self, spectrum):
        h = self.conv(spectrum).transpose(1, 2)
        table = torch.from_numpy(sinusoid(h.shape[1], h.shape[2]))
        h = h + table  # fault: mixed-devices
        return self.head(self.encoder(h))


case(Transcriber, {"conv": 0, "encoder": 1, "head": 1}, [(2, 8, 10)])


# case: fault_scripted_rotary
"""A rotary function compiled with `torch.jit.script`, called with a table of another card.

Inside it there is no Python to look at; the call is what a person sees.
"""


@torch.jit.script
def rotary(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    half = x.size(-1) // 2
    cos, sin = table[: x.size(1), :half], table[: x.size(1), half:]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qk = nn.Linear(width, width)
        self.tables = []

    def forward(self, x):
        return x + rotary(self.qk(x), self.tables[0])  # fault: mixed-devices


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            layer.tables[:] = [self.table]
            x = layer(x)
        return x


PLACEMENT = {"table": 0, "layers.0": 0, "layers.1": 1}
UNJUDGED = "compiled code can't be watched from Python"
build = Model
SHAPES = [(2, 3, 4)]


# case: fault_table_attribute
"""Rotary tables kept as plain attributes: `self.cos = ...` instead of a buffer.

Placing the model doesn't move them, so they stay on the CPU. Both products fail.
"""


def tables(length, dim):
    angle = torch.outer(torch.arange(length), 1 / 100 ** (torch.arange(0, dim, 2) / dim))
    return angle.cos(), angle.sin()


class Attention(nn.Module):
    def __init__(self, width, max_length=16):
        super().__init__()
        self.cos, self.sin = tables(max_length, width)
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, width, bias=False)
        self.wv = nn.Linear(width, width, bias=False)

    def rotate(self, x):
        even, odd = x[..., ::2], x[..., 1::2]
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        first = even * cos - odd * sin  # fault: mixed-devices
        second = even * sin + odd * cos  # fault: mixed-devices
        return torch.stack((first, second), dim=-1).flatten(-2)

    def forward(self, x):
        q, k = self.rotate(self.wq(x)), self.rotate(self.wk(x))
        return x + torch.softmax(q @ k.mT, dim=-1) @ self.wv(x)


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Attention(8) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


case(Tower, {"blocks.0": 0, "blocks.1": 0, "blocks.2": 1}, [(2, 5, 8)])


# case: fault_table_cached_on_first_use
"""A rotary helper, shared by all layers, that caches its table on the device of the first caller.

The first layer makes it on cuda:0; the layers on cuda:1 then read it there.
"""


class RotaryCache(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.cached_length = 0
        self.cos_cached = None

    def forward(self, x):
        length = x.shape[1]
        if length > self.cached_length:
            rate = 10.0 ** -torch.arange(0, self.dim, device=x.device)
            self.cos_cached = torch.arange(length, device=x.device)[:, None].mul(rate).cos()
            self.cached_length = length
        return self.cos_cached[:length]


class Layer(nn.Module):
    def __init__(self, width, rotary):
        super().__init__()
        self.rotary = rotary
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        return x + self.proj(x) * self.rotary(x)  # fault: mixed-devices


class Decoder(nn.Module):
    def __init__(self, width=6, depth=4):
        super().__init__()
        rotary = RotaryCache(width)
        self.layers = nn.ModuleList(Layer(width, rotary) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


case(Decoder, {"layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1}, [(2, 3, 6)])


# case: fault_table_indexed_on_cpu
"""A plain CPU table that is indexed with the ids of a GPU.

CUDA takes CPU indices into a GPU tensor, but not GPU indices into a CPU tensor.
"""


class FrequencyPrior(nn.Module):
    def __init__(self, vocab=30, width=8):
        super().__init__()
        self.counts = torch.rand(vocab)
        self.embed = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        h = self.embed(ids)
        weight = self.counts[ids]  # fault: mixed-devices
        h = h * weight.unsqueeze(-1).to(h.device)
        return self.head(h)


case(FrequencyPrior, {"embed": "cuda:0", "head": "cuda:1"}, lambda: (torch.randint(0, 30, (2, 3)),))


# case: fault_property_table
"""A property that rebuilds its table each time, on the CPU.

`self.bias` looks like a parameter where it is used; it is a property that calls `torch.arange`.
"""


class RelativeBias(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size
        self.proj = nn.Linear(size, size)

    @property
    def bias(self):
        steps = torch.arange(self.size, dtype=torch.float32)
        return -(steps[:, None] - steps[None]).abs()

    def forward(self, scores):
        scores = torch.sub(self.proj(scores), self.bias)  # fault: mixed-devices
        return scores.softmax(-1)


case(lambda: nn.Sequential(nn.Linear(4, 4), RelativeBias(4)), {"0": 0, "1": 1}, [(2, 4, 4)])


# case: clean_freqs_moved_once
"""Complex rotary factors in a plain attribute that forward brings along, and hands on."""


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x, freqs):
        pairs = torch.view_as_complex(self.fc(x).unflatten(-1, (-1, 2))) * freqs
        return x + torch.view_as_real(pairs).flatten(-2)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        angles = torch.outer(torch.arange(16), torch.ones(width // 2))
        self.freqs = torch.polar(torch.ones_like(angles), angles)

    def forward(self, ids):
        h = self.embed(ids)
        self.freqs = self.freqs.to(h.device)
        freqs = self.freqs[: ids.shape[1]]
        for layer in self.layers:
            h = layer(h, freqs)
        return h


case(
    Model,
    {"embed": 0, "layers.0": 0, "layers.1": 1, "layers.2": 1},
    lambda: (torch.randint(0, 9, (1, 3)),),
)


# case: clean_table_cached_per_device
"""A shared table, cached by length and device."""


class Distances:
    def __init__(self):
        self.known = {}

    def __call__(self, length, device):
        key = (length, device)
        if key not in self.known:
            steps = torch.arange(length, device=device)
            self.known[key] = (steps[:, None] - steps[None]).abs()
        return self.known[key]


class Layer(nn.Module):
    def __init__(self, width, distances):
        super().__init__()
        self.distances = distances
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        decay = torch.exp(-self.distances(x.shape[1], x.device).float())
        return x + decay @ self.fc(x)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        distances = Distances()
        self.layers = nn.ModuleList(Layer(width, distances) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


case(Model, {"layers.0": 0, "layers.1": 1, "layers.2": 0, "layers.3": 1}, [(2, 3, 4)])


# case: clean_tables_as_buffers
"""Tables that are registered as buffers, persistent or not, move with their layer."""


class Rotary(nn.Module):
    def __init__(self, dim, length=16):
        super().__init__()
        angle = torch.outer(torch.arange(length), 1 / 50 ** (torch.arange(0, dim, 2) / dim))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin())

    def forward(self, x):
        even, odd = x[..., ::2], x[..., 1::2]
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.rotary = Rotary(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        q, k = self.rotary(self.q(x)), self.rotary(self.k(x))
        return x + nn.functional.scaled_dot_product_attention(q, k, self.v(x))


case(lambda: nn.Sequential(Layer(8), Layer(8)), {"0": "cuda:0", "1": "cuda:1"}, [(2, 5, 8)])

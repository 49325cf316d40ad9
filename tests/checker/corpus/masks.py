"""Attention masks and biases: made in forward, kept, or handed along."""

import torch
import torch.nn.functional as F
from torch import nn
from seeded import case


# case: fault_tril_mask
"""A causal mask from `torch.tril(torch.ones(...))`, made on the CPU in forward.

`masked_fill` wants the mask where the scores are.
"""


class Head(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.key = nn.Linear(width, size, bias=False)
        self.query = nn.Linear(width, size, bias=False)
        self.value = nn.Linear(width, size, bias=False)

    def forward(self, x):
        _, length, _ = x.shape
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * x.shape[-1] ** -0.5
        tril = torch.tril(torch.ones(length, length))
        wei = wei.masked_fill(tril == 0, float("-inf"))  # fault: mixed-devices
        return wei.softmax(dim=-1) @ self.value(x)


class MultiHead(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.heads = nn.ModuleList(Head(width, width // num_heads) for _ in range(num_heads))
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        return x + self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


case(
    lambda: nn.Sequential(nn.Embedding(30, 12), MultiHead(12, 3), MultiHead(12, 3)),
    {"0": 0, "1": 0, "2": 1},
    lambda: (torch.randint(0, 30, (2, 4)),),
)


# case: fault_full_additive_mask
"""An additive attention mask made with `torch.full(...).triu(1)`, on the CPU, and passed along.

The model makes it once and hands it to the layers through a plain object, not as an argument of a
placed module, so that nothing moves it.
"""


class Context:
    mask: torch.Tensor


class Layer(nn.Module):
    def __init__(self, width, context):
        super().__init__()
        self.context = context
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT + self.context.mask  # fault: mixed-devices
        return x + self.out(scores.softmax(-1) @ v)


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.context = Context()
        self.layers = nn.ModuleList(Layer(width, self.context) for _ in range(2))

    def forward(self, x):
        length = x.shape[1]
        self.context.mask = torch.full((length, length), float("-inf")).triu(1)
        for layer in self.layers:
            x = layer(x)
        return x


case(Model, {"layers.0": 0, "layers.1": 1}, [(1, 4, 8)])


# case: fault_alibi_baddbmm
"""BLOOM-like attention: the ALiBi bias goes into `baddbmm`.

The bias is built from a Python list on the CPU in every forward, and `baddbmm` takes no CPU tensor
beside GPU tensors.
"""

import math


def alibi(num_heads, length):
    slopes = torch.tensor([2 ** (-8 * (head + 1) / num_heads) for head in range(num_heads)])
    return slopes[:, None, None] * torch.arange(length)[None, None, :]


class AlibiAttention(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.dense = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        shape = (batch * self.num_heads, length, width // self.num_heads)
        q, k, v = (part.reshape(shape) for part in self.qkv(x).chunk(3, dim=-1))
        bias = alibi(self.num_heads, length).repeat(batch, 1, 1)
        scale = 1 / math.sqrt(shape[-1])
        scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=scale)  # fault: mixed-devices
        context = scores.softmax(-1) @ v
        return x + self.dense(context.reshape(batch, length, width))


case(
    lambda: nn.Sequential(AlibiAttention(8, 2), AlibiAttention(8, 2)),
    {"0": "cuda:0", "1": "cuda:1"},
    [(2, 3, 8)],
)


# case: fault_alibi_in_subclass
"""A subclass overrides one method of its base and calls that with `super()`: there is the fault."""


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def bias(self, scores):
        return scores

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.bias(q @ k.mT).softmax(-1) @ v


class Alibi(Attention):
    slope = 0.5

    def bias(self, scores):
        scores = super().bias(scores)
        steps = torch.arange(scores.shape[-1])
        distance = (steps[None] - steps[:, None]).clamp(max=0)
        return scores.add(distance, alpha=self.slope)  # fault: mixed-devices


PLACEMENT = {"0": 0, "1": 1}


def build():
    return nn.Sequential(Alibi(4), Alibi(4))


SHAPES = [(2, 3, 4)]


# case: fault_table_lru_cache
"""A causal bias out of a helper with `functools.lru_cache`.

The helper knows only the length, so the bias is on the CPU for ever; it is added to GPU scores.
"""

from functools import lru_cache


@lru_cache(maxsize=4)
def causal_bias(length):
    return torch.full((length, length), -1e9).triu(diagonal=1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, hidden_states):
        q, k, v = self.qkv(self.norm(hidden_states)).chunk(3, -1)
        attention = torch.matmul(q, k.transpose(-2, -1))
        attention = attention + causal_bias(q.size(1))  # fault: mixed-devices
        return hidden_states + attention.softmax(-1).matmul(v)


case(
    lambda: nn.Sequential(nn.Embedding(20, 8), Block(8), Block(8)),
    {"0": 0, "1": 0, "2": 1},
    lambda: (torch.randint(0, 20, (1, 4)),),
)


# case: fault_bucketize
"""Relative positions are put into buckets with boundaries kept in a plain attribute.

`torch.bucketize` wants its boundaries on the input's device.
"""


class RelativeBuckets(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.boundaries = torch.tensor([1, 2, 4, 8])
        self.bias = nn.Embedding(5, heads)

    def forward(self, length):
        where = torch.arange(length, device=self.bias.weight.device)
        distance = (where[:, None] - where[None]).abs()
        bucket = torch.bucketize(distance, self.boundaries)  # fault: mixed-devices
        return self.bias(bucket).permute(2, 0, 1)


class Attention(nn.Module):
    def __init__(self, width, heads=2):
        super().__init__()
        self.heads = heads
        self.buckets = RelativeBuckets(heads)
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        scores = q @ k.mT + self.buckets(x.shape[1])
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


case(lambda: nn.Sequential(Attention(4), Attention(4)), {"0": 0, "1": 1}, [(1, 5, 4)])


# case: fault_table_module_global
"""Relative distances cached in a dictionary of the Python module, keyed by length alone.

The first layer fills it on cuda:0; the second one, on cuda:1, gets the same tensor.
"""


_DISTANCES: dict[int, torch.Tensor] = {}


def distances(length, like):
    if length not in _DISTANCES:
        steps = torch.arange(length, device=like.device, dtype=like.dtype)
        _DISTANCES[length] = (steps[:, None] - steps[None, :]).abs()
    return _DISTANCES[length]


class Decayed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.decay = nn.Parameter(torch.tensor(0.5))
        self.value = nn.Linear(width, width)

    def forward(self, x):
        weight = torch.exp(-self.decay * distances(x.shape[1], x))  # fault: mixed-devices
        return x + weight @ self.value(x)


case(lambda: nn.Sequential(Decayed(4), Decayed(4)), {"0": "cuda:0", "1": "cuda:1"}, [(2, 5, 4)])


# case: fault_batch_branch
"""Padding is masked only for batches of more than one row.

The branch makes lengths on the CPU and compares them with GPU positions; a batch of one never gets
there.
"""


class Pooled(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Embedding(20, width, padding_idx=0)
        self.encoder = nn.Linear(width, width)

    def forward(self, ids):
        h = self.encoder(self.embed(ids))
        if ids.shape[0] > 1:
            lengths = torch.tensor([int(row.count_nonzero()) for row in ids])
            where = torch.arange(ids.shape[1], device=h.device)
            keep = where[None, :] < lengths[:, None]  # fault: mixed-devices
            h = h * keep.unsqueeze(-1)
        return h.sum(1)


case(Pooled, {"embed": 0, "encoder": 1}, lambda: (torch.tensor([[1, 2, 3, 0], [4, 5, 0, 0]]),))


# case: fault_kwargs_attention
"""Attention called with a dictionary of keyword arguments.

The mask stays on cuda:0 inside the dictionary, which the model itself unpacks; queries, keys and
values come from the projections on cuda:1.
"""


class CrossAttention(nn.Module):
    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(12, width)
        self.to_qkv = nn.Linear(width, 3 * width)
        self.to_out = nn.Linear(width, width)

    def forward(self, ids):
        x = self.embed(ids)
        options = {"attn_mask": (ids != 0)[:, None, None, :], "dropout_p": 0.0}
        q, k, v = self.to_qkv(x).chunk(3, -1)
        tensors = {
            name: tensor.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for name, tensor in {"query": q, "key": k, "value": v}.items()
        }
        out = F.scaled_dot_product_attention(**tensors, **options)  # fault: mixed-devices
        return self.to_out(out.transpose(1, 2).flatten(2))


case(
    CrossAttention,
    {"embed": "cuda:0", "to_qkv": "cuda:1", "to_out": "cuda:1"},
    lambda: {"ids": torch.randint(1, 12, (2, 5))},
)


# case: clean_attention_backends
"""Attention under PyTorch's switches for its kernels, with masks, dropout and grouped queries."""

from torch.nn.attention import SDPBackend, sdpa_kernel


class Grouped(nn.Module):
    def __init__(self, width=8, heads=4, groups=2):
        super().__init__()
        self.heads, self.groups, self.dim = heads, groups, width // heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * groups * self.dim)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.heads, self.dim)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2 * self.groups, self.dim)).transpose(1, 2).chunk(2, 1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(q, k, v, mask, 0.1, enable_gqa=True)
        return x + out.transpose(1, 2).flatten(2)


case(lambda: nn.Sequential(Grouped(), Grouped()), {"0": 0, "1": 1}, [(2, 5, 8)])


# case: clean_evaluation_fast_path
"""PyTorch's encoder stack in evaluation mode, with padding: its own fast path."""


class Classifier(nn.Module):
    def __init__(self, vocab=12, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 3)

    @torch.no_grad()
    def forward(self, ids):
        h = self.encoder(self.embed(ids), src_key_padding_mask=ids == 0)
        return self.head(h.mean(1))


case(
    lambda: Classifier().eval(),
    {"embed": 0, "encoder.layers.0": 0, "encoder.layers.1": 1, "head": 1},
    lambda: (torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]),),
)


# case: clean_padded_sequences
"""`pad_sequence` copies each row into a new tensor, from whichever card it is on."""

from torch.nn.utils.rnn import pad_sequence


class Rows(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.short, self.long = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        rows = [self.short(x[:2]), self.long(x)]
        return self.out(pad_sequence(rows, batch_first=True))


case(lambda: Rows().requires_grad_(False), {"short": 0, "long": 1, "out": 1}, [(3, 4)])

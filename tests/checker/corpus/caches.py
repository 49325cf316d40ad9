"""Key-value caches and states that outlive a step."""

import torch
from torch import nn
from seeded import case


# case: fault_cache_gathered_at_prefill
"""All layers' keys are concatenated into one tensor at prefill.

The layers lie on two cards, their caches too: `torch.cat` raises.
"""


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.kv = nn.Linear(width, 2 * width)
        self.q = nn.Linear(width, width)

    def forward(self, x, past):
        k, v = self.kv(x).chunk(2, -1)
        if past is not None:
            k, v = torch.cat((past[0], k), 1), torch.cat((past[1], v), 1)
        return x + (self.q(x) @ k.mT).softmax(-1) @ v, torch.stack((k, v))


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(4))

    def step(self, ids, cache):
        x, presents = self.embed(ids), ()
        for number, layer in enumerate(self.layers):
            x, present = layer(x, None if cache is None else cache[number])
            presents = (*presents, present.unsqueeze(0))
        return x, torch.cat(presents, dim=0)  # fault: mixed-devices

    def forward(self, ids):
        x, cache = self.step(ids, None)
        for _ in range(2):
            x, cache = self.step(x[:, -1].argmax(-1, keepdim=True), cache)
        return x


case(
    Model,
    {"embed": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1},
    lambda: (torch.randint(0, 12, (2, 4)),),
)


# case: fault_index_copy_cache
"""A static cache made at once for all layers on the first card.

`index_copy_` takes positions and states of the layer's card, the cache is on cuda:0.
"""


class CachedLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.key = nn.Linear(width, width)
        self.query = nn.Linear(width, width)

    def forward(self, x, positions, caches, index):
        keys = caches.tensors[index]
        keys.index_copy_(1, positions, self.key(x))  # fault: in-place
        scores = self.query(x) @ keys.to(x.device).mT
        return x + scores.softmax(-1) @ keys.to(x.device)


class StaticCaches:
    def __init__(self, depth, shape, device):
        self.tensors = [torch.zeros(shape, device=device) for _ in range(depth)]


class Model(nn.Module):
    def __init__(self, width=8, depth=2):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.layers = nn.ModuleList(CachedLayer(width) for _ in range(depth))

    def forward(self, ids):
        x = self.embed(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)
        caches = StaticCaches(len(self.layers), (ids.shape[0], 8, x.shape[-1]), ids.device)
        for index, layer in enumerate(self.layers):
            x = layer(x, positions, caches, index)
        return x


case(Model, {"embed": 0, "layers.0": 0, "layers.1": 1}, lambda: (torch.randint(0, 10, (2, 3)),))


# case: fault_decode_only
"""Prefill is fine; decoding concatenates the new state with a summary kept on the first card.

The first pass takes another branch, so that the fault shows from the second step on.
"""


class Summarising(nn.Module):
    def __init__(self, vocab=14, width=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(2 * width, vocab)

    def step(self, ids, summary):
        embedded = self.embed(ids)
        h, _ = self.body(embedded)
        if summary is None:
            both = torch.cat((h, torch.zeros_like(h)), -1)
        else:
            both = torch.cat((h, summary), -1)  # fault: mixed-devices
        return self.head(both), embedded.mean(1, keepdim=True)

    def forward(self, ids):
        logits, summary = self.step(ids, None)
        for _ in range(3):
            logits, summary = self.step(logits[:, -1:].argmax(-1), summary)
        return logits


case(Summarising, {"embed": 0, "body": 1, "head": 1}, lambda: (torch.randint(0, 14, (2, 5)),))


# case: fault_generating_subclass
"""A subclass of a model of transformers that fails only while it generates.

Once there is a cache, its logits are divided by penalties that are kept on the CPU. There are no
example inputs: a check runs the prompt and decode steps by itself.
"""

from transformers import LlamaConfig, LlamaForCausalLM


class PenalisedLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.penalties = [torch.ones(config.vocab_size)]

    def forward(self, input_ids=None, **options):
        cache = options.get("cache", options.get("past_key_values"))
        past = 0 if cache is None else cache.get_seq_length()
        out = super().forward(input_ids=input_ids, **options)
        if past > 0:
            out.logits = out.logits / self.penalties[0]  # fault: mixed-devices
        return out


PLACEMENT = {
    "model.embed_tokens": 0,
    "model.rotary_emb": 0,
    "model.layers.0": 0,
    "model.layers.1": 1,
    "model.norm": 1,
    "lm_head": 1,
}
UNJUDGED = "without inputs only a check knows how to run it"


def build():
    return PenalisedLlama(
        LlamaConfig(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
        )
    )


def inputs():
    return None


# case: clean_cache_per_layer
"""A key-value cache in which each layer's tensors stay on the layer's card."""


class Cache:
    def __init__(self):
        self.layers = {}

    def update(self, index, k, v):
        if index in self.layers:
            past_k, past_v = self.layers[index]
            k, v = torch.cat((past_k, k), 1), torch.cat((past_v, v), 1)
        self.layers[index] = (k, v)
        return k, v

    def length(self):
        return self.layers[0][0].shape[1] if self.layers else 0


class Layer(nn.Module):
    def __init__(self, width, index):
        super().__init__()
        self.index = index
        self.kv, self.q = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x, cache):
        k, v = cache.update(self.index, *self.kv(x).chunk(2, -1))
        return x + (self.q(x) @ k.mT).softmax(-1) @ v


class Model(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.position = nn.Embedding(16, width)
        self.layers = nn.ModuleList(Layer(width, index) for index in range(4))

    def forward(self, ids):
        cache = Cache()
        for _ in range(3):
            past = cache.length()
            steps = torch.arange(past, past + ids.shape[1], device=ids.device)
            x = self.embed(ids) + self.position(steps)
            for layer in self.layers:
                x = layer(x, cache)
            ids = x[:, -1:].argmax(-1).to(ids.device)
        return x


case(
    Model,
    {
        "embed": 0,
        "position": 0,
        "layers.0": 0,
        "layers.1": 0,
        "layers.2": 1,
        "layers.3": 1,
    },
    lambda: (torch.randint(0, 12, (2, 4)),),
)

"""A key-value cache in which each layer's tensors stay on the layer's card."""

import torch
from torch import nn


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


PLACEMENT = {
    "embed": 0,
    "position": 0,
    "layers.0": 0,
    "layers.1": 0,
    "layers.2": 1,
    "layers.3": 1,
}
TRAIN = False


def build():
    return Model()


def inputs():
    return (torch.randint(0, 12, (2, 4)),)

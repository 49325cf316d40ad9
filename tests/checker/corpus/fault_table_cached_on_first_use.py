"""A rotary helper, shared by all layers, that caches its table on the device of the first caller.

The first layer makes it on cuda:0; the layers on cuda:1 then read it there.
"""

import torch
from torch import nn


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


PLACEMENT = {"layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1}
TRAIN = False


def build():
    return Decoder()


def inputs():
    return (torch.randn(2, 3, 6),)

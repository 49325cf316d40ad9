"""An additive attention mask made with `torch.full(...).triu(1)`, on the CPU, and passed along.

The model makes it once and hands it to the layers through a plain object, not as an argument of a
placed module, so that nothing moves it.
"""

import torch
from torch import nn


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


PLACEMENT = {"layers.0": 0, "layers.1": 1}
TRAIN = False


def build():
    return Model()


def inputs():
    return (torch.randn(1, 4, 8),)

"""A weighted sum of layer outputs through a generator expression.

The mixing weights lie on cuda:0; the second half of the outputs comes from cuda:1. The product
stands inside the generator and fails there. Python's `sum` then adds what is on cuda:0 to what the
products of cuda:1 give.
"""

import torch
from torch import nn


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


PLACEMENT = {"mix": 0, "layers.0": 0, "layers.1": 0, "layers.2": 1, "layers.3": 1}
TRAIN = False


def build():
    return LayerPool()


def inputs():
    return (torch.randn(2, 6),)

"""A rotary function compiled with `torch.jit.script`, called with a table of another card.

Inside it there is no Python to look at; the call is what a person sees.
"""

import torch
from torch import nn


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
TRAIN = False
UNJUDGED = "compiled code can't be watched from Python"


def build():
    return Model()


def inputs():
    return (torch.randn(2, 3, 4),)

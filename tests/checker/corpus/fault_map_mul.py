"""Gates and values are multiplied pairwise through `map(torch.mul, gates, values)`.

`map` is lazy: the products are made by `torch.stack(tuple(...))` on the next line, where the
generator is consumed.
"""

import torch
from torch import nn


class Heads(nn.Module):
    def __init__(self, width=4, count=3):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.values = nn.ModuleList(nn.Linear(width, width) for _ in range(count))

    def forward(self, x):
        gates = [gate(x).sigmoid() for gate in self.gates]
        values = [value(x) for value in self.values]
        products = map(torch.mul, gates, values)
        together = tuple(products)  # fault: mixed-devices
        return torch.stack(together).mean(0)


PLACEMENT = {"gates": 0, "values": 1}
TRAIN = False


def build():
    return Heads()


def inputs():
    return (torch.randn(2, 4),)

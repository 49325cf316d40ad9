"""A function at module level with `@torch.compile`, as fused activations are written.

Compiled or not, the bias of cuda:0 meets states of cuda:1 in it.
"""

import torch
from torch import nn


@torch.compile(dynamic=True)
def bias_gelu(x, bias):
    return nn.functional.gelu(x + bias)  # fault: mixed-devices


class Model(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return bias_gelu(self.down(bias_gelu(self.up(x), self.bias)), self.bias)


PLACEMENT = {"bias": 0, "up": 0, "down": 1}
TRAIN = False


def build():
    return Model()


def inputs():
    return (torch.randn(2, 5),)

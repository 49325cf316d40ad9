"""Operators called by their registered names, past PyTorch's Python functions."""

import torch
from torch import nn


class Raw(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        return torch.ops.aten.mul.Tensor(a, b)  # fault: mixed-devices


PLACEMENT = {"a": 0, "b": 1}
TRAIN = False


def build():
    return Raw()


def inputs():
    return (torch.randn(2, 4),)

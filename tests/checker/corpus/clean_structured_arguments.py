"""Placed modules take tuples, dictionaries and named tuples; the tensors in them are moved."""

from typing import NamedTuple

import torch
from torch import nn


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Combine(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, pair, options, *rest):
        y = self.fc(pair.left + pair.right) * options["scale"]["by"]
        return y + sum(part for group in rest for part in group)


class Model(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.combine = Combine(width)

    def forward(self, x):
        pair = Pair(self.a(x), self.b(x))
        return self.combine(pair, {"scale": {"by": x.abs()}}, [x, pair.left], (pair.right,))


PLACEMENT = {"a": 0, "b": 1, "combine": 1}
TRAIN = False


def build():
    return Model()


def inputs():
    return (torch.randn(2, 5),)

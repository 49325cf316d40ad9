"""Subclasses of `nn.ModuleList` and `nn.Sequential`, and modules in dictionaries."""

import torch
from torch import nn


class Tower(nn.ModuleList):
    def forward(self, x):
        for layer in self:
            x = layer(x).relu()
        return x


class Gated(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * torch.sigmoid(self[-1].bias)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.tower = Tower(nn.Linear(width, width) for _ in range(3))
        self.gated = Gated(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
        self.routes = {"a": self.tower, "b": self.gated}

    def forward(self, x, route="a"):
        for name in (route, "b"):
            x = self.routes[name](x)
        return x


PLACEMENT = {"tower.0": 0, "tower.1": 0, "tower.2": 1, "gated": 1}
TRAIN = False


def build():
    return Model()


def inputs():
    return {"x": torch.randn(2, 4)}

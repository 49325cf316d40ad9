"""A residual layer that brings its input to "cuda" before its own projection.

On cuda:1 the projection's weight and its input are on two cards: `.to("cuda")` takes the input
away from the card that the layer lies on.
"""

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.norm(x)
        y = self.fc(y.to("cuda"))  # fault: hard-coded-device
        return x + y.relu()


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.bins = nn.Embedding(10, 6)
        self.block = Residual(6)

    def forward(self, bins):
        return self.block(self.bins(bins).mean(1))


PLACEMENT = {"bins": "cuda:0", "block": "cuda:1"}
TRAIN = False


def build():
    return Tabular()


def inputs():
    return {"bins": torch.randint(0, 10, (4, 3))}

"""Model parallelism by hand: `.to("cuda:1")` between the halves, right on this placement alone."""

import torch
from torch import nn


class ByHand(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        h = self.first(x).relu()
        h = h.to("cuda:1")  # warning: hard-coded-device
        return self.second(h) * self.scale


PLACEMENT = {"first": "cuda:0", "second": "cuda:1", "scale": "cuda:1"}
TRAIN = False


def build():
    return ByHand()


def inputs():
    return (torch.randn(2, 4),)

"""The usual `"cuda" if torch.cuda.is_available() else "cpu"` inside a layer of the second card.

On a machine with cards this is cuda:0, without one it is the CPU; the layer is on cuda:1, so that
the subtraction fails either way.
"""

import torch
from torch import nn


class Prototypes(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.count = count
        self.reduce = nn.Linear(width, 2)

    def forward(self, x):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        corners = torch.ones(self.count, 2, device=device).cumsum(0)  # origin
        distance = self.reduce(x)[:, None] - corners  # fault: mixed-devices
        return distance.pow(2).sum(-1)


PLACEMENT = {"0": "cuda:0", "2": "cuda:1"}
TRAIN = False


def build():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), Prototypes(6, 3))


def inputs():
    return (torch.randn(4, 6),)

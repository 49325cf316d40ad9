"""Another card's scalar may fill: `fill_`, `masked_fill` and `index_fill` read its value."""

import torch
from torch import nn


class Filled(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        low = self.a(x).amin()
        y = self.b(x)
        y = y.masked_fill(y > 0, low)
        y = y.index_fill(-1, torch.tensor([0], device=y.device), low)
        limits = torch.full((2,), low.item(), device=y.device)
        return y, torch.empty_like(y).fill_(low), limits


PLACEMENT = {"a": 0, "b": 1}
TRAIN = False


def build():
    return Filled().requires_grad_(False)


def inputs():
    return (torch.randn(2, 4),)

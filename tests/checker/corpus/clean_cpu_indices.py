"""CPU tensors may index a GPU tensor: positions and masks, for reading and for writing."""

import torch
from torch import nn


class Reordered(nn.Module):
    def __init__(self, width=8, groups=2):
        super().__init__()
        self.order = torch.arange(width).view(groups, -1).t().flatten()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(x)[..., self.order]
        y = y[:, torch.tensor([True, False, True])]
        z = torch.zeros_like(y)
        z[:, torch.tensor([1])] = y[:, torch.tensor([0])]
        z[:, [0]] = 2.0
        return z


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(nn.Linear(8, 8), Reordered())


def inputs():
    return (torch.randn(2, 3, 8),)

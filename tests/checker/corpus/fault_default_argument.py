"""A tensor as a default argument: made once, on the CPU, when the function is defined."""

import torch
from torch import nn


def smoothed(x, kernel=torch.tensor([0.25, 0.5, 0.25])):  # noqa: B008
    windows = x.unfold(-1, 3, 1)
    return torch.matmul(windows, kernel)  # fault: mixed-devices


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.out = nn.Linear(6, 8), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(smoothed(self.inp(x)))


PLACEMENT = {"inp": 0, "out": 1}
TRAIN = False


def build():
    return Model()


def inputs():
    return (torch.randn(2, 6),)

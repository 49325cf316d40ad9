"""Durations that are computed on the CPU and given to `repeat_interleave` of GPU states."""

import torch
from torch import nn


class Regulator(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(x)
        durations = torch.arange(1, y.shape[0] + 1)
        return torch.repeat_interleave(y, durations, dim=0)  # fault: mixed-devices


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(nn.Linear(4, 4), Regulator(4))


def inputs():
    return (torch.randn(3, 4),)

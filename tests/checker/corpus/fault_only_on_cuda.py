"""A fast path that is taken on CUDA alone, with a table that stays on the CPU."""

import torch
from torch import nn


class Fast(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.scales = torch.linspace(0.5, 1.5, width)

    def forward(self, x):
        y = self.fc(x)
        if y.is_cuda:
            y = y * self.scales  # fault: mixed-devices
        return y


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False
UNJUDGED = "a virtual GPU isn't CUDA"


def build():
    return nn.Sequential(Fast(), nn.Linear(4, 4))


def inputs():
    return (torch.randn(2, 4),)

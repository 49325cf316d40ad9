"""A projection that is made on first use, when the width is known: its weights are on the CPU."""

import torch
from torch import nn


class Lazy(nn.Module):
    def __init__(self, outside):
        super().__init__()
        self.outside = outside
        self.gain = nn.Parameter(torch.ones(outside))
        self.proj = None

    def forward(self, x):
        if self.proj is None:
            self.proj = nn.Linear(x.shape[-1], self.outside)
        return self.gain * self.proj(x)  # fault: mixed-devices


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(nn.Linear(4, 6), Lazy(3))


def inputs():
    return (torch.randn(2, 4),)

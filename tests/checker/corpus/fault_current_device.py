"""Positions on `f"cuda:{torch.cuda.current_device()}"`: the first card if nobody sets another."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, width))

    def forward(self, x):
        device = f"cuda:{torch.cuda.current_device()}"
        steps = torch.arange(x.shape[1], device=device)  # origin
        return x + self.table[steps]  # fault: hard-coded-device


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(nn.Linear(4, 4), Layer(4))


def inputs():
    return (torch.randn(2, 3, 4),)

"""A metric that is no module but callable, and keeps a running tensor of the first card it met."""

import torch
from torch import nn


class Running:
    def __init__(self):
        self.total = None

    def __call__(self, x):
        mean = x.mean(0)
        self.total = mean if self.total is None else self.total + mean  # fault: mixed-devices
        return self.total


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        running = Running()
        for layer in self.layers:
            x = layer(x).tanh()
            running(x)
        return x, running.total


PLACEMENT = {"layers.0": 0, "layers.1": 1, "layers.2": 1}
TRAIN = False


def build():
    return Model()


def inputs():
    return (torch.randn(2, 4),)

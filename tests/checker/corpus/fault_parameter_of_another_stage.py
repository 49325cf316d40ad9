"""The last stage scales with the first layer's learned gain.

`self.layers[0].gain` is a parameter on cuda:0, the states are on cuda:1 by then.
"""

import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return self.gain * self.fc(x)


class Net(nn.Module):
    def __init__(self, width=7, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Scaled(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = x / self.layers[0].gain  # fault: mixed-devices
        return self.out(x)


PLACEMENT = {"layers.0": 0, "layers.1": 1, "layers.2": 1, "out": 1}
TRAIN = False


def build():
    return Net()


def inputs():
    return (torch.randn(2, 7),)

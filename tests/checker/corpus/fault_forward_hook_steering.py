"""Activation steering: a forward hook adds a vector that the hook's closure holds on the CPU.

The hook runs after a placed layer; its vector is on no card.
"""

import torch
from torch import nn


def steer(vector, strength):
    def hook(module, args, output):
        return output + strength * vector  # fault: mixed-devices

    return hook


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


PLACEMENT = {"layers.0": 0, "layers.1": 0, "layers.2": 1}
TRAIN = False


def build():
    net = Net()
    for layer in list(net.layers)[1:]:
        layer.register_forward_hook(steer(torch.randn(6), 2.0))
    return net


def inputs():
    return (torch.randn(2, 6),)

"""Python's `max` over the layers' losses: it compares scalars of two cards."""

import torch
from torch import nn


class Hardest(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        losses = []
        for layer in self.layers:
            x = layer(x)
            losses.append(x.square().mean())
        return max(losses)  # fault: mixed-devices


PLACEMENT = {"layers.0": 0, "layers.1": 1, "layers.2": 1}
TRAIN = True


def build():
    return Hardest()


def inputs():
    return (torch.randn(2, 4),)

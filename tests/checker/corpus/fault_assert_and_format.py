"""Checks and messages mix devices too: an assertion, and a number in an f-string."""

import torch
from torch import nn


class Careful(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.message = ""

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        assert not torch.equal(a, b)  # fault: mixed-devices
        self.message = f"{(a - b).abs().mean().item():.3f}"  # fault: mixed-devices
        return b


PLACEMENT = {"a": 0, "b": 1}
TRAIN = False


def build():
    return Careful()


def inputs():
    return (torch.randn(2, 4),)

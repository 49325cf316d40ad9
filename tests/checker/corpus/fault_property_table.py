"""A property that rebuilds its table each time, on the CPU.

`self.bias` looks like a parameter where it is used; it is a property that calls `torch.arange`.
"""

import torch
from torch import nn


class RelativeBias(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size
        self.proj = nn.Linear(size, size)

    @property
    def bias(self):
        steps = torch.arange(self.size, dtype=torch.float32)
        return -(steps[:, None] - steps[None]).abs()

    def forward(self, scores):
        scores = torch.sub(self.proj(scores), self.bias)  # fault: mixed-devices
        return scores.softmax(-1)


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(nn.Linear(4, 4), RelativeBias(4))


def inputs():
    return (torch.randn(2, 4, 4),)

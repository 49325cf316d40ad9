"""A branch that depends on a value: tokens above a threshold take a detour.

The detour reads a CPU constant. Inputs make sure that it is taken.
"""

import torch
from torch import nn


class EarlyExit(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.prior = torch.ones(width) / width
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x, confidence):
        h = self.first(x)
        if confidence.max().item() > 0.5:
            h = torch.maximum(h, self.prior)  # fault: mixed-devices
        return self.second(h)


PLACEMENT = {"first": 0, "second": 1}
TRAIN = False


def build():
    return EarlyExit()


def inputs():
    return {"x": torch.randn(2, 5), "confidence": torch.tensor([0.2, 0.9])}

"""A list membership test and `list.index` compare tensors, across cards."""

import torch
from torch import nn


class Deduplicate(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        seen = []
        for layer in self.layers:
            x = layer(x)
            score = x.sum()
            if score not in seen:  # fault: mixed-devices
                seen.append(score)
        return x, len(seen)


PLACEMENT = {"layers.0": 0, "layers.1": 0, "layers.2": 1}
TRAIN = False


def build():
    return Deduplicate()


def inputs():
    return (torch.randn(2, 4),)

"""A moving average kept at the model's root is updated with statistics of the last stage.

`lerp_` writes into a buffer on cuda:0 what was computed on cuda:1.
"""

import torch
from torch import nn


class Tracked(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.register_buffer("average", torch.zeros(width))
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x):
        h = self.second(self.first(x).relu())
        with torch.no_grad():
            self.average.lerp_(h.mean(0), 0.1)  # fault: in-place
        return h.square().mean()


PLACEMENT = {"average": 0, "first": 0, "second": 1}
TRAIN = True


def build():
    return Tracked()


def inputs():
    return (torch.randn(4, 6),)

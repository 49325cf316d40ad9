"""`torch.addcmul(*terms, value=...)` with terms of several cards.

The list is put together from a base on cuda:0 and two factors on cuda:1.
"""

import torch
from torch import nn


class Cross(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)

    def forward(self, x):
        terms = [module(x) for module in (self.base, self.left, self.right)]
        return torch.addcmul(*terms, value=0.5)  # fault: mixed-devices


PLACEMENT = {"base": 0, "left": 1, "right": 1}
TRAIN = False


def build():
    return Cross()


def inputs():
    return (torch.randn(2, 5),)

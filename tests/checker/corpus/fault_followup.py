"""A mixed sum, and a write that fails only because of where the check went on.

`left + right` mixes cuda:0 and cuda:1; the module entered last is on cuda:1, so there it goes on.
The write into `base` on cuda:0 then takes that sum from cuda:1: settled on cuda:0, all is well.
"""

import torch
from torch import nn


class Audit(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.last = nn.Linear(width, 1)

    def forward(self, x):
        base = torch.zeros_like(x)
        left = self.left(x)
        right = self.right(left)
        both = left + right  # fault: mixed-devices
        base.add_(both)  # followup
        return self.last(base)


PLACEMENT = {"left": 0, "right": 1, "last": 1}
TRAIN = False


def build():
    return Audit()


def inputs():
    return (torch.randn(2, 5),)

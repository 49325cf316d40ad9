"""Branches of an Inception-like block are added with `functools.reduce(torch.add, ...)`.

The call of `torch.add` is made by `reduce`, in C; the line that mixes cards is the one with
`reduce`.
"""

from functools import reduce

import torch
from torch import nn


class Branches(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 1)
        self.branches = nn.ModuleList(
            nn.Conv2d(width, width, size, padding=size // 2) for size in (1, 3, 5)
        )

    def forward(self, x):
        x = self.stem(x)
        outputs = [branch(x) for branch in self.branches]
        return reduce(torch.add, outputs).relu()  # fault: mixed-devices


PLACEMENT = {"stem": 0, "branches.0": 0, "branches.1": 0, "branches.2": 1}
TRAIN = False


def build():
    return Branches()


def inputs():
    return (torch.randn(1, 3, 6, 6),)

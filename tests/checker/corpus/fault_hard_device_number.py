"""An accumulator made with `device=0` in a layer on the second card.

The in-place addition writes a tensor of cuda:1 into one of cuda:0.
"""

import torch
from torch import nn


class Ensemble(nn.Module):
    def __init__(self, width, num_members):
        super().__init__()
        self.width = width
        self.members = nn.ModuleList(nn.Linear(width, width) for _ in range(num_members))

    def forward(self, x):
        total = torch.zeros(x.shape[0], self.width, device=0)  # origin
        for member in self.members:
            total += member(x)  # fault: in-place
        return total / len(self.members)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.ensemble = Ensemble(8, 3)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.ensemble(self.stem(x).relu()))


PLACEMENT = {"stem": 0, "ensemble": 1, "head": 1}
TRAIN = False


def build():
    return Net()


def inputs():
    return (torch.randn(3, 5),)

"""A cell that remembers its last output, fine when it is called first.

`forward` calls the pair of cells twice; on the second round the first cell's memory holds what the
second one wrote, on cuda:1, through the shared object.
"""

import torch
from torch import nn


class Shared:
    value = None


class Cell(nn.Module):
    def __init__(self, width, shared):
        super().__init__()
        self.shared = shared
        self.fc = nn.Linear(width, width)

    def forward(self, x, *, writes):
        y = self.fc(x)
        if self.shared.value is not None and not writes:
            y = y + self.shared.value  # fault: mixed-devices
        if writes:
            self.shared.value = y
        return y.tanh()


class Loop(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.shared = Shared()
        self.reader, self.writer = Cell(width, self.shared), Cell(width, self.shared)

    def forward(self, x):
        self.shared.value = None
        for _ in range(2):
            x = self.writer(self.reader(x, writes=False), writes=True)
        return x


PLACEMENT = {"reader": 0, "writer": 1}
TRAIN = False


def build():
    return Loop()


def inputs():
    return (torch.randn(2, 5),)

"""A helper that is right for no side: it is called with cuda:0 first, and with cuda:1 first."""

import torch
from torch import nn


def gate(value, by):
    return value * by.sigmoid()  # fault: mixed-devices


class Crossed(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        left, right = self.left(x), self.right(x)
        first, second = gate(left, right), gate(right, left)
        return self.out(first), self.out(second)


PLACEMENT = {"left": 0, "right": 1, "out": 1}
TRAIN = False


def build():
    return Crossed()


def inputs():
    return (torch.randn(2, 4),)

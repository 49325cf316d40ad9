"""A closure that keeps the first layer's output and adds it to later ones.

`make_skip` remembers a tensor of cuda:0; the function that it returns is called on cuda:1.
"""

import torch
from torch import nn


def make_skip(remembered, strength):
    def add(x):
        return x + strength * remembered  # fault: mixed-devices

    return add


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.third = nn.Linear(width, width)

    def forward(self, x):
        x = self.first(x).relu()
        skip = make_skip(x, 0.1)
        x = skip(self.second(x).relu())
        return skip(self.third(x))


PLACEMENT = {"first": 0, "second": 1, "third": 1}
TRAIN = False


def build():
    return Net()


def inputs():
    return (torch.randn(3, 6),)

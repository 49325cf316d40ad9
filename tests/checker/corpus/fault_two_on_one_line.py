"""Two faults on one line: each of two products takes a CPU table of its own.

Settling one of them doesn't cure the other.
"""

import torch
from torch import nn


class Complex(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.phase = [torch.linspace(0, 1, width).cos(), torch.linspace(0, 1, width).sin()]
        self.re, self.im = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        re, im = self.re(x), self.im(x)
        real, imag = re * self.phase[0], im * self.phase[1]  # fault: mixed-devices
        return torch.stack((real, imag), -1)


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(nn.Linear(4, 4), Complex())


def inputs():
    return (torch.randn(2, 4),)

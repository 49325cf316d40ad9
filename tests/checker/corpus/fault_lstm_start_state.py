"""An LSTM inside a placed block gets a start state made on the CPU.

The block brings its own arguments, but the LSTM is not placed by itself; cuDNN refuses a hidden
state on another device.
"""

import torch
from torch import nn


class Captioner(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x):
        start = torch.zeros(1, x.shape[0], self.width)
        out, _ = self.lstm(x, (start, start))  # fault: mixed-devices
        return out


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(nn.Linear(6, 6), Captioner(6))


def inputs():
    return (torch.randn(2, 3, 6),)

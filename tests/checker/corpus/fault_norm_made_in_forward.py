"""`nn.LayerNorm(width)(x)` written as if it were a function: fresh weights on the CPU each time."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = nn.LayerNorm(x.shape[-1])(x)  # fault: mixed-devices
        return x + self.fc(y)


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(Block(4), Block(4))


def inputs():
    return (torch.randn(2, 4),)

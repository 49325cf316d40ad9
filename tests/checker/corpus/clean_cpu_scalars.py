"""CPU tensors without dimensions mix with any card, from either side and in place."""

import math

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.eps = torch.tensor(1e-5)
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        scale = torch.tensor(1 / math.sqrt(x.shape[-1]))
        y = scale * self.fc(x) + self.eps
        y = torch.where(y > 0, y, torch.tensor(0.01))
        y = torch.clamp(y, max=torch.tensor(5.0)).masked_fill(y.isnan(), torch.tensor(0.0))
        y.mul_(torch.tensor(0.5))
        return x + y


PLACEMENT = {"0": "cuda:0", "1": "cuda:1"}
TRAIN = False


def build():
    return nn.Sequential(Block(4), Block(4))


def inputs():
    return (torch.randn(3, 4),)

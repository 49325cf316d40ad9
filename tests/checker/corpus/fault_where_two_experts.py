"""Two experts on two cards, chosen token by token with `torch.where`.

Both branches are computed; the first comes out on cuda:0 and the second on cuda:1.
"""

import torch
from torch import nn


class Switch(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, 1)
        self.left = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.right = nn.Sequential(
            nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        to_left = self.gate(x) > 0
        left, right = self.left(x), self.right(x)
        y = torch.where(to_left, left, right)  # fault: mixed-devices
        return self.norm(y)


PLACEMENT = {"gate": 0, "left": 0, "right": 1, "norm": 1}
TRAIN = False


def build():
    return Switch(12)


def inputs():
    return (torch.randn(2, 7, 12),)

"""Sums and chains over many lines; Python names the line on which the operation begins."""

import torch
from torch import nn


class Sums(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.c = nn.Linear(width, width)

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        total = (
            a.abs() * 0.5  # fault: mixed-devices
            + b.abs()
        )
        return self.c(
            total,
        ) + torch.mul(
            torch.relu(
                a,
            ),
            2.0,
        ).to(
            b.device,
        )


PLACEMENT = {"a": 0, "b": 1, "c": 1}
TRAIN = False


def build():
    return Sums()


def inputs():
    return (torch.randn(2, 4),)

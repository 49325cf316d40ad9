"""A constant of the Python file, made at import, and a nested list of tensors joined in forward."""

import torch
from torch import nn

COEFFICIENTS = torch.tensor([1.0, 0.5, 0.25])


class Polynomial(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.roots = [[torch.tensor([0.1 * i])] for i in range(4)]

    def forward(self, x):
        powers = torch.stack([self.fc(x) ** k for k in range(3)], dim=-1)
        y = powers @ COEFFICIENTS  # fault: mixed-devices
        roots = torch.cat([root for (root,) in self.roots])
        return y - roots  # fault: mixed-devices


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(nn.Linear(4, 4), Polynomial())


def inputs():
    return (torch.randn(2, 4),)

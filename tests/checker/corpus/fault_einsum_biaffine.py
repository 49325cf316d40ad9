"""A biaffine parser: heads and dependents come from two encoders on two cards.

The first `einsum` takes the dependents (cuda:0) and the weight (cuda:1); its result, once that is
settled on cuda:1, meets the heads there.
"""

import torch
from torch import nn


class Biaffine(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.dependent = nn.Linear(12, width)
        self.head = nn.Linear(12, width)
        self.weight = nn.Parameter(torch.randn(width, width))

    def forward(self, words):
        dependents = self.dependent(words).tanh()
        heads = self.head(words).tanh()
        left = torch.einsum("bid,de->bie", dependents, self.weight)  # fault: mixed-devices
        return torch.einsum("bie,bje->bij", left, heads)


PLACEMENT = {"dependent": 0, "head": 1, "weight": 1}
TRAIN = False


def build():
    return Biaffine()


def inputs():
    return (torch.randn(2, 5, 12),)

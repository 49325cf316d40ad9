"""`torch.bmm(..., out=...)` into scratch space that was made for another card.

The scratch tensor is a buffer of the model's root on cuda:0, the factors are on cuda:1.
"""

import torch
from torch import nn


class Scratch(nn.Module):
    def __init__(self, width=4, length=3):
        super().__init__()
        self.register_buffer("scratch", torch.empty(2, length, length), persistent=False)
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.requires_grad_(False)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        scores = torch.bmm(q, k.transpose(1, 2), out=self.scratch)  # fault: in-place
        return scores.softmax(-1)


PLACEMENT = {"scratch": 0, "q": 1, "k": 1}
TRAIN = False


def build():
    return Scratch()


def inputs():
    return (torch.randn(2, 3, 4),)

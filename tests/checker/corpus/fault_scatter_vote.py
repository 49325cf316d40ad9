"""Votes are collected with `scatter_add_` into a tensor made beside the keys.

The keys stay on cuda:0 with the encoder; the scores come from a head on cuda:1.
"""

import torch
from torch import nn


class Voting(nn.Module):
    def __init__(self, width=6, bins=5):
        super().__init__()
        self.bins = bins
        self.encoder = nn.Linear(width, width)
        self.scorer = nn.Linear(width, 1)

    def forward(self, x, keys):
        scores = self.scorer(self.encoder(x).relu()).squeeze(-1)
        votes = x.new_zeros(x.shape[0], self.bins)
        votes.scatter_add_(1, keys, scores)  # fault: in-place
        return votes.softmax(-1)


PLACEMENT = {"encoder": 0, "scorer": 1}
TRAIN = False


def build():
    return Voting()


def inputs():
    return {"x": torch.randn(2, 4, 6), "keys": torch.randint(0, 5, (2, 4))}

"""Stochastic depth with Python's and PyTorch's random numbers; unique values and counts."""

import random

import torch
from torch import nn


class Stochastic(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, ids):
        values, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
        h = self.embed(values)[inverse] * counts[inverse].unsqueeze(-1)
        for layer in self.layers:
            if random.random() < 0.9 and torch.rand(()) < 0.9:
                h = h.to(layer.weight.device) + layer(h)
        return h.sort(dim=1).values, torch.bincount(ids.flatten())


PLACEMENT = {"embed": 0, "layers.0": 0, "layers.1": 1, "layers.2": 0, "layers.3": 1}
TRAIN = False


def build():
    return Stochastic()


def inputs():
    return (torch.randint(0, 9, (2, 5)),)

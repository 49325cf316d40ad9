"""`torch.vmap` over a function that closes over a tensor of another card."""

import torch
from torch import nn


class Pairwise(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.keys, self.queries = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        keys = self.keys(x)

        def nearest(query):
            return (keys - query).square().sum(-1).amin()  # fault: mixed-devices

        return torch.vmap(nearest)(self.queries(x))


PLACEMENT = {"keys": 0, "queries": 1}
TRAIN = False


def build():
    return Pairwise()


def inputs():
    return (torch.randn(3, 4),)

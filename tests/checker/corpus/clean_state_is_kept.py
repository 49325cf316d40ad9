"""A model that counts its calls and keeps what it saw: a check must leave none of it behind."""

import torch
from torch import nn


class Counting(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.calls, self.seen, self.last = 0, [], None
        self.options = {"warm": False}
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.a, self.b = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x):
        self.calls += 1
        self.steps += 1
        self.options["warm"] = True
        y = self.b(self.a(x))
        self.seen.append(tuple(y.shape))
        self.last = y.detach()
        return {"loss": y.square().mean()}


PLACEMENT = {"steps": 0, "a": 0, "b": 1}
TRAIN = True


def build():
    return Counting()


def inputs():
    return {"x": torch.randn(5, 4)}

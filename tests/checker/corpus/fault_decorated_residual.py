"""A decorator adds the residual around every sublayer method.

The wrapper's addition mixes cards where the wrapped method calls a module that is placed elsewhere.
"""

from functools import wraps

import torch
from torch import nn


def residual(method):
    @wraps(method)
    def wrapper(self, x, *args):
        return x + method(self, x, *args)  # fault: mixed-devices

    return wrapper


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.mixer = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU())

    @residual
    def mix(self, x):
        return self.mixer(x)

    @residual
    def feed_forward(self, x, gain):
        return gain * self.mlp(x)

    def forward(self, x):
        return self.feed_forward(self.mix(self.stem(x)), 0.5)


PLACEMENT = {"stem": "cuda:0", "mixer": "cuda:0", "mlp": "cuda:1"}
TRAIN = False


def build():
    return Model()


def inputs():
    return (torch.randn(2, 6),)

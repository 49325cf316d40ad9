"""A context manager notes the states that pass, and a method compares the first and the last.

The first state is on cuda:0, the last one on cuda:1; `mse_loss` gets both.
"""

from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn


class Consistent(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.trace = None
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    @contextmanager
    def tracing(self):
        self.trace = []
        try:
            yield self.trace
        finally:
            self.trace = None

    def step(self, layer, x):
        x = layer(x).tanh()
        if self.trace is not None:
            self.trace.append(x)
        return x

    def forward(self, x):
        with self.tracing() as states:
            for layer in self.layers:
                x = self.step(layer, x)
            drift = F.mse_loss(states[0], states[-1])  # fault: mixed-devices
        return {"loss": drift, "out": x}


PLACEMENT = {"layers.0": "cuda:0", "layers.1": "cuda:1", "layers.2": "cuda:1"}
TRAIN = True


def build():
    return Consistent()


def inputs():
    return {"x": torch.randn(2, 6)}

"""Eight layers with the same fault on the same line: one fault, met eight times.

Each makes its sinks on the CPU.
"""

import torch
from torch import nn


class SinkLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.score = nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, x):
        scores = self.score(x)
        sinks = torch.zeros(*scores.shape[:-1], 1)
        share = torch.cat((sinks, scores), -1).softmax(-1)[..., 1:]  # fault: mixed-devices
        return x + share * self.value(x)


class Deep(nn.Module):
    def __init__(self, width=4, depth=8):
        super().__init__()
        self.layers = nn.ModuleList(SinkLayer(width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


PLACEMENT = {f"layers.{i}": f"cuda:{i // 3}" for i in range(8)}
TRAIN = False


def build():
    return Deep()


def inputs():
    return (torch.randn(2, 3, 4),)

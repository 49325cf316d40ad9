"""A shared table, cached by length and device."""

import torch
from torch import nn


class Distances:
    def __init__(self):
        self.known = {}

    def __call__(self, length, device):
        key = (length, device)
        if key not in self.known:
            steps = torch.arange(length, device=device)
            self.known[key] = (steps[:, None] - steps[None]).abs()
        return self.known[key]


class Layer(nn.Module):
    def __init__(self, width, distances):
        super().__init__()
        self.distances = distances
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        decay = torch.exp(-self.distances(x.shape[1], x.device).float())
        return x + decay @ self.fc(x)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        distances = Distances()
        self.layers = nn.ModuleList(Layer(width, distances) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


PLACEMENT = {"layers.0": 0, "layers.1": 1, "layers.2": 0, "layers.3": 1}
TRAIN = False


def build():
    return Model()


def inputs():
    return (torch.randn(2, 3, 4),)

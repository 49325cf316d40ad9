"""Complex rotary factors in a plain attribute that forward brings along, and hands on."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x, freqs):
        pairs = torch.view_as_complex(self.fc(x).unflatten(-1, (-1, 2))) * freqs
        return x + torch.view_as_real(pairs).flatten(-2)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.embed = nn.Embedding(9, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        angles = torch.outer(torch.arange(16), torch.ones(width // 2))
        self.freqs = torch.polar(torch.ones_like(angles), angles)

    def forward(self, ids):
        h = self.embed(ids)
        self.freqs = self.freqs.to(h.device)
        freqs = self.freqs[: ids.shape[1]]
        for layer in self.layers:
            h = layer(h, freqs)
        return h


PLACEMENT = {"embed": 0, "layers.0": 0, "layers.1": 1, "layers.2": 1}
TRAIN = False


def build():
    return Model()


def inputs():
    return (torch.randint(0, 9, (1, 3)),)

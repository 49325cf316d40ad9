"""Load-balancing losses of all layers are summed with Python's `sum`.

Each is a scalar, but of a GPU: only CPU scalars mix. The layers lie on two cards.
"""

import torch
from torch import nn


class Routed(nn.Module):
    def __init__(self, width, num_experts=3):
        super().__init__()
        self.gate = nn.Linear(width, num_experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(num_experts))

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        parts = torch.stack([expert(x) for expert in self.experts], dim=-1)
        balance = share.mean((0, 1)).pow(2).sum() * share.shape[-1]
        return x + (parts * share.unsqueeze(-2)).sum(-1), balance


class Model(nn.Module):
    def __init__(self, width=6, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Routed(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        auxiliary = []
        for layer in self.layers:
            x, balance = layer(x)
            auxiliary.append(balance)
        loss = self.head(x).pow(2).mean()
        return loss + 0.01 * sum(auxiliary)  # fault: mixed-devices


PLACEMENT = {"layers.0": 0, "layers.1": 1, "layers.2": 1, "head": 1}
TRAIN = True


def build():
    return Model()


def inputs():
    return (torch.randn(2, 3, 6),)

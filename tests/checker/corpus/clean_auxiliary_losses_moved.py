"""Losses of several cards are brought to the last one, and added."""

import torch
import torch.nn.functional as F
from torch import nn


class Routed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.fc = nn.Linear(width, 3), nn.Linear(width, width)

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        return x + self.fc(x) * share[..., :1], share.mean(0).pow(2).sum()


class Model(nn.Module):
    def __init__(self, width=6, depth=3):
        super().__init__()
        self.register_buffer("class_weights", torch.tensor([0.5, 1.0, 1.5]))
        self.layers = nn.ModuleList(Routed(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x, labels):
        auxiliary = []
        for layer in self.layers:
            x, balance = layer(x)
            auxiliary.append(balance)
        logits = self.head(x)
        main = F.cross_entropy(logits, labels.to(logits.device), weight=self.class_weights)
        extra = torch.stack([each.to(main.device) for each in auxiliary]).sum()
        return {"loss": main + 0.1 * extra, "logits": logits}


PLACEMENT = {"class_weights": 1, "layers.0": 0, "layers.1": 0, "layers.2": 1, "head": 1}
TRAIN = True


def build():
    return Model()


def inputs():
    return {"x": torch.randn(4, 6), "labels": torch.tensor([0, 1, 2, 1])}

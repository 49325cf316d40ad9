"""A loss that is a submodule with a buffer, placed with the first stage, called as a function.

`nn.CrossEntropyLoss(weight=...)` is a module that the map names: its arguments move to it. What it
gives is then added to an auxiliary loss of the last stage.
"""

import torch
from torch import nn


class Weighted(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 0.3, 0.5]))
        self.trunk, self.head = nn.Linear(5, 8), nn.Linear(8, classes)

    def forward(self, x, labels):
        logits = self.head(self.trunk(x).relu())
        loss = self.criterion(logits, labels)
        penalty = logits.square().mean()
        return {"loss": loss + 0.1 * penalty}  # fault: mixed-devices


PLACEMENT = {"criterion": 0, "trunk": 0, "head": 1}
TRAIN = True


def build():
    return Weighted()


def inputs():
    return {"x": torch.randn(4, 5), "labels": torch.tensor([0, 1, 2, 1])}

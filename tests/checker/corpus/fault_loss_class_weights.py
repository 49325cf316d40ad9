"""Class weights kept as a plain tensor attribute and given to `cross_entropy`.

The labels are moved properly; the weights stay on the CPU, for the module's state doesn't know
them.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Imbalanced(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.class_weights = torch.tensor([0.2, 0.3, 0.5])
        self.features = nn.Sequential(nn.Linear(10, 16), nn.ReLU())
        self.classifier = nn.Linear(16, classes)

    def forward(self, x, labels):
        logits = self.classifier(self.features(x))
        labels = labels.to(logits.device)
        weight = self.class_weights
        loss = F.cross_entropy(logits, labels, weight=weight)  # fault: mixed-devices
        return {"logits": logits, "loss": loss}


PLACEMENT = {"features": "cuda:0", "classifier": "cuda:1"}
TRAIN = True


def build():
    return Imbalanced()


def inputs():
    return {"x": torch.randn(6, 10), "labels": torch.tensor([0, 1, 2, 0, 1, 2])}

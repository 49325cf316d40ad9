"""A loss with its class weights bound by `functools.partial` in `__init__`.

The bound tensor is neither parameter nor buffer; it stays on the CPU.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn


class MultiLabel(nn.Module):
    def __init__(self, labels=4):
        super().__init__()
        positive = torch.linspace(1.0, 3.0, labels)
        self.criterion = partial(F.binary_cross_entropy_with_logits, pos_weight=positive)
        self.encoder = nn.Linear(9, 16)
        self.head = nn.Linear(16, labels)

    def forward(self, x, target):
        logits = self.head(self.encoder(x).relu())
        loss = self.criterion(logits, target.to(logits.device))  # fault: mixed-devices
        return {"loss": loss, "logits": logits}


PLACEMENT = {"encoder": 0, "head": 1}
TRAIN = True


def build():
    return MultiLabel()


def inputs():
    return {"x": torch.randn(5, 9), "target": torch.randint(0, 2, (5, 4)).float()}

"""The final norm reuses the first norm's weight through `F.layer_norm`.

The weight and bias lie on cuda:0 with the first norm, the states on cuda:1.
"""

import torch
import torch.nn.functional as F
from torch import nn


class SharedNorm(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.encoder = nn.Linear(width, width)
        self.decoder = nn.Linear(width, width)

    def forward(self, x):
        h = self.encoder(self.norm(x))
        h = self.decoder(h.relu())
        shape = self.norm.normalized_shape
        return F.layer_norm(h, shape, self.norm.weight, self.norm.bias)  # fault: mixed-devices


PLACEMENT = {"norm": 0, "encoder": 0, "decoder": 1}
TRAIN = False


def build():
    return SharedNorm()


def inputs():
    return (torch.randn(3, 10),)

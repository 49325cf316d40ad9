"""`.numpy()` on a GPU tensor: CUDA's tensors have to be brought to the CPU first."""

import numpy as np
import torch
from torch import nn


class Quantile(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(x)
        values = y.detach().numpy()  # fault: mixed-devices
        return y - float(np.median(values))


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False
UNJUDGED = "the error is no mixture that could be settled by moving"


def build():
    return nn.Sequential(nn.Linear(4, 4), Quantile(4))


def inputs():
    return (torch.randn(2, 4),)

"""A detour through numpy that comes back to the card that it left."""

import numpy as np
import torch
from torch import nn


class Quantile(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(x)
        levels = np.quantile(y.detach().cpu().numpy(), [0.1, 0.9], axis=0)
        low, high = torch.from_numpy(levels).to(device=y.device, dtype=y.dtype)
        return (y - low) / (high - low + 1.0)


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(Quantile(4), Quantile(4))


def inputs():
    return (torch.randn(8, 4),)

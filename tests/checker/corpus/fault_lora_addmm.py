"""LoRA whose low-rank matrices live in one dictionary at the model's root.

Adapters were added later and placed on cuda:0 as a whole; the second projection runs on cuda:1,
and `addmm` mixes its output with what the adapter gives on cuda:0.
"""

import torch
from torch import nn


class LoraNet(nn.Module):
    def __init__(self, width=12, rank=2):
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)
        self.down = nn.ParameterDict({n: torch.randn(width, rank) for n in ("fc1", "fc2")})
        self.up = nn.ParameterDict({n: torch.zeros(rank, width) for n in ("fc1", "fc2")})
        self.scaling = 0.5

    def adapted(self, name, x):
        base = getattr(self, name)(x)
        low = x @ self.down[name]
        return torch.addmm(base, low, self.up[name], alpha=self.scaling)  # fault: mixed-devices

    def forward(self, x):
        h = self.adapted("fc1", x)
        return {"loss": self.adapted("fc2", h.relu()).pow(2).mean()}


PLACEMENT = {"fc1": 0, "fc2": 1, "down": 0, "up": 0}
TRAIN = True


def build():
    return LoraNet()


def inputs():
    return (torch.randn(4, 12),)

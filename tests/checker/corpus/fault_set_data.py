"""Fast weights written through `.data` and `torch.no_grad`: the update comes from another card."""

import torch
from torch import nn


class FastWeights(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fast = nn.Linear(width, width, bias=False)
        self.slow = nn.Linear(width, width)

    def forward(self, x):
        y = self.slow(x)
        update = y.detach().t() @ y.detach()
        self.fast.weight.data.add_(update, alpha=0.01)  # fault: in-place
        return self.fast(x)


PLACEMENT = {"fast": 0, "slow": 1}
TRAIN = False


def build():
    return FastWeights()


def inputs():
    return (torch.randn(2, 4),)

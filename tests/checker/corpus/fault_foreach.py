"""`torch._foreach_add` over lists: the pairs are on two cards."""

import torch
from torch import nn


class Averaged(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fast, self.slow = nn.Linear(width, width), nn.Linear(width, width)

    @torch.no_grad()
    def blended(self):
        fast, slow = list(self.fast.parameters()), list(self.slow.parameters())
        return torch._foreach_add(slow, fast, alpha=0.1)  # fault: mixed-devices

    def forward(self, x):
        weight, bias = self.blended()
        return nn.functional.linear(x.to(weight.device), weight, bias) + self.slow(x).to(weight)


PLACEMENT = {"fast": 0, "slow": 1}
TRAIN = False


def build():
    return Averaged()


def inputs():
    return (torch.randn(2, 4),)

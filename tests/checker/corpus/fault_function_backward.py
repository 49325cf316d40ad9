"""A custom `autograd.Function` that fails only in backward.

Forward moves the mask properly, but backward multiplies the gradient, on cuda:1, with the mask as
it was: on the CPU.
"""

import torch
from torch import nn


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mask):
        ctx.mask = mask
        return x * mask.to(x.device)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.mask, None  # fault: mixed-devices


class Pruned(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.keep = (torch.arange(width) % 2).float()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x):
        h = Masked.apply(self.second(self.first(x)), self.keep)
        return {"loss": h.pow(2).sum(), "hidden": h}


PLACEMENT = {"first": 0, "second": 1}
TRAIN = True


def build():
    return Pruned()


def inputs():
    return {"x": torch.randn(2, 6)}

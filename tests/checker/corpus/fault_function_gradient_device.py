"""A custom "bridge" whose backward leaves the gradient on the wrong card.

Forward brings its input from cuda:0 to cuda:1. Backward returns what came in, on cuda:1; autograd
refuses a gradient on another device than the input's.
"""

import torch
from torch import nn


class Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, like):
        return x.to(like.device)

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None  # fault: gradient


class Split(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.left = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x):
        h = Bridge.apply(self.left(x), self.scale.detach())
        return (h * self.scale).pow(2).mean()


PLACEMENT = {"left": 0, "scale": 1}
TRAIN = True
UNJUDGED = "the wrong gradient would reach C++ code of autograd's, which can't pass on the error"


def build():
    return Split()


def inputs():
    return (torch.randn(3, 6),)

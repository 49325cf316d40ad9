"""A custom `autograd.Function` whose forward multiplies across cards.

The activation's slopes are a parameter on cuda:0, its input comes from cuda:1.
"""

import torch
from torch import nn


class Slope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x, slope)
        return x * slope  # fault: mixed-devices

    @staticmethod
    def backward(ctx, grad):
        x, slope = ctx.saved_tensors
        return grad * slope.to(grad.device), (grad * x).sum(0).to(slope.device)


class Net(nn.Module):
    def __init__(self, width=5):
        super().__init__()
        self.slope = nn.Parameter(torch.ones(width))
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x):
        h = self.fc2(self.fc1(x))
        return Slope.apply(h, self.slope).square().mean()


PLACEMENT = {"slope": "cuda:0", "fc1": "cuda:0", "fc2": "cuda:1"}
TRAIN = True


def build():
    return Net()


def inputs():
    return (torch.randn(4, 5),)

"""A closure and a lambda over parameters, called on the parameters' own card."""

import torch
from torch import nn


def gated(parameter):
    def apply(x):
        return x * parameter.sigmoid()

    return apply


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.zeros(width))
        self.scale = lambda x: x * self.gain + self.fc.bias

    def forward(self, x):
        return gated(self.gain)(self.fc(x)) + self.scale(x)


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(Layer(5), Layer(5))


def inputs():
    return (torch.randn(2, 5),)

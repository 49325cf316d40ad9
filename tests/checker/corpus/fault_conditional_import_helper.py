"""A helper bound at run time: a method is replaced on the instance by a plain function."""

import types

import torch
from torch import nn


def patched(self, x):
    y = self.fc(x)
    return y * torch.arange(1.0, y.shape[-1] + 1)  # fault: mixed-devices


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def transform(self, x):
        return self.fc(x)

    def forward(self, x):
        return x + self.transform(x)


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    model = nn.Sequential(Layer(4), Layer(4))
    model[1].transform = types.MethodType(patched, model[1])
    return model


def inputs():
    return (torch.randn(2, 4),)

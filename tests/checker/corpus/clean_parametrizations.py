"""Weight norm, spectral norm and a parametrization of the project's own."""

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(width, width))
        self.spectral = parametrizations.spectral_norm(nn.Linear(width, width))
        self.symmetric = nn.Linear(width, width)
        parametrize.register_parametrization(self.symmetric, "weight", Symmetric())

    def forward(self, x):
        return self.symmetric(self.spectral(self.normed(x).relu()).relu()).square().mean()


PLACEMENT = {"normed": "cuda:0", "spectral": "cuda:1", "symmetric": "cuda:1"}
TRAIN = True


def build():
    return Model()


def inputs():
    return (torch.randn(3, 6),)

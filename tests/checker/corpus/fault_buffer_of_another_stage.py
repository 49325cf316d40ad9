"""A learned-frequency buffer of the embedding stage is read again by the last stage.

`bands` is a buffer placed on cuda:0; the output of the decoder is on cuda:1.
"""

import torch
from torch import nn


class Encoding(nn.Module):
    def __init__(self, num_bands):
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(num_bands))

    def forward(self, x):
        angles = x[..., None] * self.bands
        return torch.cat((angles.sin(), angles.cos()), -1).flatten(-2)


class RadianceField(nn.Module):
    def __init__(self, num_bands=4):
        super().__init__()
        self.encoding = Encoding(num_bands)
        self.field = nn.Sequential(nn.Linear(6 * num_bands, 16), nn.ReLU())
        self.out = nn.Linear(16, num_bands)

    def forward(self, points):
        amplitude = self.out(self.field(self.encoding(points)))
        return (amplitude / self.encoding.bands).sum(-1)  # fault: mixed-devices


PLACEMENT = {"encoding": "cuda:0", "field": "cuda:0", "out": "cuda:1"}
TRAIN = False


def build():
    return RadianceField()


def inputs():
    return {"points": torch.rand(7, 3)}

"""Positions are moved with `.cuda()` before they index a parameter.

`.cuda()` is cuda:0; the position table belongs to a layer on cuda:1, and an index on another card
is refused.
"""

import torch
from torch import nn


class PatchEmbed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.proj = nn.Linear(12, width)

    def forward(self, patches):
        return self.proj(patches)


class Encoder(nn.Module):
    def __init__(self, width, size=16):
        super().__init__()
        self.position = nn.Parameter(torch.randn(size, width))
        self.layer = nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        where = torch.arange(x.shape[1]).cuda()  # origin
        x = x + self.position[where]  # fault: hard-coded-device
        return self.layer(x)


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = PatchEmbed(8)
        self.encoder = Encoder(8)

    def forward(self, patches):
        return self.encoder(self.embed(patches)).mean(1)


PLACEMENT = {"embed": 0, "encoder": 1}
TRAIN = False


def build():
    return ViT()


def inputs():
    return {"patches": torch.randn(2, 4, 12)}

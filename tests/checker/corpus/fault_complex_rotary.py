"""Rotary factors as complex numbers in a plain attribute, multiplied as Llama's first code did."""

import torch
from torch import nn


def factors(dim, length):
    angles = torch.outer(torch.arange(length), 100.0 ** (-torch.arange(0, dim, 2) / dim))
    return torch.polar(torch.ones_like(angles), angles)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.freqs_cis = factors(width, 16)
        self.wq, self.wv = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        pairs = torch.view_as_complex(self.wq(x).unflatten(-1, (-1, 2)))
        turned = pairs * self.freqs_cis[: x.shape[1]]  # fault: mixed-devices
        q = torch.view_as_real(turned).flatten(-2)
        return x + (q @ q.mT).softmax(-1) @ self.wv(x)


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(Attention(4), Attention(4))


def inputs():
    return (torch.randn(1, 3, 4),)

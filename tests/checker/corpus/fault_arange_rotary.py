"""Rotary angles from positions that are counted on the CPU.

`inv_freq` is a buffer on each layer's card; `torch.outer` multiplies it with CPU positions.
"""

import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        inv_freq = 1.0 / base ** (torch.arange(0, dim, 2) / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, length):
        t = torch.arange(length).float()
        angles = torch.outer(t, self.inv_freq)  # fault: mixed-devices
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.rotary = Rotary(width)
        self.qk = nn.Linear(width, 2 * width, bias=False)
        self.v = nn.Linear(width, width, bias=False)

    def forward(self, x):
        cos, sin = self.rotary(x.shape[1])
        q, k = (y * cos + rotate_half(y) * sin for y in self.qk(x).chunk(2, dim=-1))
        return x + (q @ k.transpose(1, 2)).softmax(-1) @ self.v(x)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


PLACEMENT = {"layers.0": 0, "layers.1": 1, "layers.2": 1}
TRAIN = False


def build():
    return Stack()


def inputs():
    return {"x": torch.randn(1, 5, 8)}

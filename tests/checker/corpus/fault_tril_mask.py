"""A causal mask from `torch.tril(torch.ones(...))`, made on the CPU in forward.

`masked_fill` wants the mask where the scores are.
"""

import torch
from torch import nn


class Head(nn.Module):
    def __init__(self, width, size):
        super().__init__()
        self.key = nn.Linear(width, size, bias=False)
        self.query = nn.Linear(width, size, bias=False)
        self.value = nn.Linear(width, size, bias=False)

    def forward(self, x):
        _, length, _ = x.shape
        wei = self.query(x) @ self.key(x).transpose(-2, -1) * x.shape[-1] ** -0.5
        tril = torch.tril(torch.ones(length, length))
        wei = wei.masked_fill(tril == 0, float("-inf"))  # fault: mixed-devices
        return wei.softmax(dim=-1) @ self.value(x)


class MultiHead(nn.Module):
    def __init__(self, width, num_heads):
        super().__init__()
        self.heads = nn.ModuleList(Head(width, width // num_heads) for _ in range(num_heads))
        self.proj = nn.Linear(width, width)

    def forward(self, x):
        return x + self.proj(torch.cat([head(x) for head in self.heads], dim=-1))


PLACEMENT = {"0": 0, "1": 0, "2": 1}
TRAIN = False


def build():
    return nn.Sequential(nn.Embedding(30, 12), MultiHead(12, 3), MultiHead(12, 3))


def inputs():
    return (torch.randint(0, 30, (2, 4)),)

"""A sliding-window mask made with `device="cuda"` in each layer.

"cuda" means cuda:0. That is right in the first layer; in the second, on cuda:1, the mask meets
scores of another card.
"""

import torch
from torch import nn


class WindowAttention(nn.Module):
    def __init__(self, width, window):
        super().__init__()
        self.window = window
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def window_mask(self, length):
        ones = torch.ones(length, length, dtype=torch.bool, device="cuda")  # origin
        return ones.tril() & ones.triu(-self.window)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ k.transpose(-1, -2)
        mask = self.window_mask(x.shape[1])
        scores = scores.masked_fill(~mask, -1e9)  # fault: hard-coded-device
        return x + self.proj(scores.softmax(-1) @ v)


PLACEMENT = {"0": "cuda:0", "1": "cuda:1"}
TRAIN = False


def build():
    return nn.Sequential(WindowAttention(8, 2), WindowAttention(8, 2))


def inputs():
    return (torch.randn(1, 6, 8),)

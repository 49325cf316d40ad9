"""Every tensor that forward makes is made where its partner is."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.register_buffer("inv_freq", 1 / 10 ** torch.linspace(0, 1, width // 2))

    def forward(self, x):
        length, options = x.shape[1], {"device": x.device, "dtype": x.dtype}
        t = torch.arange(length, device=self.inv_freq.device)
        angle = torch.outer(t, self.inv_freq)
        q, k, v = (self.qkv(x) * torch.cat((angle.cos(), angle.sin()), -1).repeat(1, 3)).chunk(
            3, -1
        )
        mask = torch.full((length, length), float("-inf"), **options).triu(1)
        bias = torch.eye(length, **options) + torch.tensor([0.0], **options)
        state = x.new_zeros(length) + torch.zeros_like(mask[0]) + torch.linspace(0, 1, length).to(x)
        return x + (q @ k.mT + mask + bias + state).softmax(-1) @ v


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(Attention(6), Attention(6))


def inputs():
    return (torch.randn(2, 4, 6),)

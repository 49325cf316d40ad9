"""A causal bias out of a helper with `functools.lru_cache`.

The helper knows only the length, so the bias is on the CPU for ever; it is added to GPU scores.
"""

from functools import lru_cache

import torch
from torch import nn


@lru_cache(maxsize=4)
def causal_bias(length):
    return torch.full((length, length), -1e9).triu(diagonal=1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, hidden_states):
        q, k, v = self.qkv(self.norm(hidden_states)).chunk(3, -1)
        attention = torch.matmul(q, k.transpose(-2, -1))
        attention = attention + causal_bias(q.size(1))  # fault: mixed-devices
        return hidden_states + attention.softmax(-1).matmul(v)


PLACEMENT = {"0": 0, "1": 0, "2": 1}
TRAIN = False


def build():
    return nn.Sequential(nn.Embedding(20, 8), Block(8), Block(8))


def inputs():
    return (torch.randint(0, 20, (1, 4)),)

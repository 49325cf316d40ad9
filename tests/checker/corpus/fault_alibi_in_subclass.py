"""A subclass overrides one method of its base and calls that with `super()`: there is the fault."""

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def bias(self, scores):
        return scores

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return x + self.bias(q @ k.mT).softmax(-1) @ v


class Alibi(Attention):
    slope = 0.5

    def bias(self, scores):
        scores = super().bias(scores)
        steps = torch.arange(scores.shape[-1])
        distance = (steps[None] - steps[:, None]).clamp(max=0)
        return scores.add(distance, alpha=self.slope)  # fault: mixed-devices


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(Alibi(4), Alibi(4))


def inputs():
    return (torch.randn(2, 3, 4),)

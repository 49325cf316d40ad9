"""A gated scan whose start state is made beside its input, with lazily made tables by layer."""

import torch
from torch import nn


class Scan(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.decay = nn.Parameter(torch.rand(width))
        self.inp = nn.Linear(width, 2 * width)
        self.window = None

    def forward(self, x):
        if self.window is None or self.window.device != x.device:
            self.window = torch.hann_window(x.shape[1], device=x.device)
        value, gate = self.inp(x * self.window[:, None]).chunk(2, -1)
        state, outputs = x.new_zeros(x.shape[0], x.shape[-1]), []
        for step in range(x.shape[1]):
            state = state * self.decay.sigmoid() + value[:, step]
            outputs.append(state * gate[:, step].sigmoid())
        return x + torch.stack(outputs, 1)


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(Scan(4), Scan(4))


def inputs():
    return (torch.randn(2, 5, 4),)

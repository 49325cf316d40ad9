"""Modules that ask their parameters for a device, and a `with torch.device(...)` block."""

import torch
from torch import nn


class Start(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.cell = nn.GRUCell(width, width)

    @property
    def device(self):
        return next(self.parameters()).device

    def forward(self, x):
        state = torch.zeros(x.shape[0], self.width, device=self.device)
        with torch.device(self.cell.weight_hh.device):
            ramp = torch.linspace(0, 1, self.width)
        for step in x.to(self.device).unbind(1):
            state = self.cell(step, state) * ramp
        return state


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.start = Start(6)

    def forward(self, x):
        return self.start(self.inp(x))


PLACEMENT = {"inp": "cuda:0", "start": "cuda:1"}
TRAIN = False


def build():
    return Model()


def inputs():
    return (torch.randn(2, 3, 4),)

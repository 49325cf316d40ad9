"""`with torch.device("cuda"):` around factories, in a layer of the second card."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        with torch.device("cuda"):  # origin
            ramp = torch.linspace(0, 1, x.shape[-1])  # origin
            shift = torch.zeros(x.shape[-1])  # origin
        y = self.fc(x) * ramp  # fault: mixed-devices
        return torch.maximum(y, shift)  # fault: mixed-devices


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(nn.Linear(4, 4), Layer(4))


def inputs():
    return (torch.randn(2, 4),)

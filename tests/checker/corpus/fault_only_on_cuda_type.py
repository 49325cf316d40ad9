"""The same with `device.type == "cuda"`, in a layer of the second card."""

import torch
from torch import nn


class Fast(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.offset = [torch.ones(width)]

    def forward(self, x):
        y = self.fc(x)
        if x.device.type == "cuda":
            y = torch.sub(y, self.offset[0])  # fault: mixed-devices
        return y


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False
UNJUDGED = "a virtual GPU isn't CUDA"


def build():
    return nn.Sequential(nn.Linear(4, 4), Fast())


def inputs():
    return (torch.randn(2, 4),)

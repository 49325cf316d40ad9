"""Code that asserts that it runs on CUDA, and asks for its current device and capability."""

import torch
from torch import nn


class Kernel(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(x)
        assert y.device.type != "cpu"
        with torch.autocast(y.device.type, enabled=False):
            y = y.float().square()
        if torch.cuda.is_available():
            torch.cuda.synchronize(y.device)
        return y.to(x.dtype)


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False
UNJUDGED = "its code wants a GPU"


def build():
    return nn.Sequential(Kernel(), Kernel())


def inputs():
    return (torch.randn(2, 4),)

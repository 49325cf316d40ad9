"""An anti-aliasing filter kept as a plain tensor and given to `conv2d`.

The convolution's weight stays on the CPU.
"""

import torch
import torch.nn.functional as F
from torch import nn


class BlurPool(nn.Module):
    def __init__(self, channels):
        super().__init__()
        row = torch.tensor([1.0, 2.0, 1.0])
        self.kernel = (row[:, None] * row[None, :] / 16).expand(channels, 1, 3, 3)

    def forward(self, x):
        groups = x.shape[1]
        return F.conv2d(x, self.kernel, None, 2, 1, 1, groups)  # fault: mixed-devices


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1)
        self.pool = BlurPool(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return self.pool(self.conv2(self.pool(self.conv1(x)).relu()))


PLACEMENT = {"conv1": "cuda:0", "conv2": "cuda:1"}
TRAIN = False


def build():
    return Net()


def inputs():
    return (torch.randn(1, 3, 8, 8),)

"""A U-Net that concatenates its skips with the upsampled features.

`torch.cat` gets one tensor of cuda:1 (out of the upsampling) and one of cuda:0 (the skip).
"""

import torch
import torch.nn.functional as F
from torch import nn


def double_conv(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1),
        nn.GroupNorm(2, outside),
        nn.SiLU(),
        nn.Conv2d(outside, outside, 3, padding=1),
    )


class CatUNet(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.enc1 = double_conv(1, width)
        self.enc2 = double_conv(width, 2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.dec = double_conv(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, image):
        first = self.enc1(image)
        second = self.enc2(F.max_pool2d(first, 2))
        upper = self.up(second)
        merged = torch.cat([first, upper], dim=1)  # fault: mixed-devices
        return self.head(self.dec(merged))


PLACEMENT = {"enc1": 0, "enc2": 0, "up": 1, "dec": 1, "head": 1}
TRAIN = False


def build():
    return CatUNet()


def inputs():
    return {"image": torch.randn(2, 1, 8, 8)}

"""Feature pyramids of two backbones are fused in a list comprehension.

Level by level one feature is on cuda:0 and the other on cuda:1.
"""

import torch
from torch import nn


class Pyramid(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Conv2d(3 if level == 0 else width, width, 3, 2, 1) for level in range(3)
        )

    def forward(self, x):
        levels = []
        for stage in self.stages:
            x = stage(x).relu()
            levels.append(x)
        return levels


class TwoStream(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.rgb = Pyramid(width)
        self.flow = Pyramid(width)
        self.heads = nn.ModuleList(nn.Conv2d(width, 1, 1) for _ in range(3))

    def forward(self, rgb, flow):
        pairs = zip(self.rgb(rgb), self.flow(flow), strict=True)
        fused = [colour * motion for colour, motion in pairs]  # fault: mixed-devices
        return [head(level) for head, level in zip(self.heads, fused, strict=True)]


PLACEMENT = {"rgb": 0, "flow": 1, "heads": 1}
TRAIN = False


def build():
    return TwoStream()


def inputs():
    return {"rgb": torch.randn(1, 3, 16, 16), "flow": torch.randn(1, 3, 16, 16)}

"""Two faults of different causes in one forward.

A table on the CPU is gathered from with GPU indices, and then a skip of cuda:0 meets the last
stage's output on cuda:1.
"""

import torch
from torch import nn


class Bucketed(nn.Module):
    def __init__(self, width=6, buckets=8):
        super().__init__()
        self.offsets = torch.arange(buckets, dtype=torch.float32)
        self.inp = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x, buckets):
        shift = torch.index_select(self.offsets, 0, buckets)  # fault: mixed-devices
        skip = self.inp(x)
        h = self.out(skip.relu())
        h = h - skip  # fault: mixed-devices
        return h * shift.to(h.device)[:, None]


PLACEMENT = {"inp": 0, "out": 1}
TRAIN = False


def build():
    return Bucketed()


def inputs():
    return {"x": torch.randn(3, 6), "buckets": torch.tensor([1, 0, 7])}

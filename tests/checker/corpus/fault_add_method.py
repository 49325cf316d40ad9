"""A wide-and-deep recommender that sums its logits with `add_`.

The wide part's logits are the target, on cuda:0; the deep part's come from cuda:1.
"""

import torch
from torch import nn


class WideAndDeep(nn.Module):
    def __init__(self, items=40):
        super().__init__()
        self.wide = nn.EmbeddingBag(items, 1, mode="sum")
        self.table = nn.EmbeddingBag(items, 8, mode="mean")
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, items):
        logits = self.wide(items)
        logits.add_(self.deep(self.table(items)))  # fault: in-place
        return logits.sigmoid()


PLACEMENT = {"wide": 0, "table": 0, "deep": 1}
TRAIN = False


def build():
    return WideAndDeep()


def inputs():
    return (torch.randint(0, 40, (4, 5)),)

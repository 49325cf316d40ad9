"""An embedding with sparse gradients, and an embedding bag with offsets."""

import torch
from torch import nn


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(12, 4, mode="sum")
        self.table = nn.Embedding(12, 4)
        self.out = nn.Linear(4, 1)

    def forward(self, items, offsets):
        h = self.bag(items, offsets)
        h = h.to(self.out.weight.device) + self.table(items[: len(offsets)]).to(self.out.weight)
        return self.out(h).square().mean()


PLACEMENT = {"bag": 0, "table": 0, "out": 1}
TRAIN = True


def build():
    return Bags()


def inputs():
    return {"items": torch.randint(0, 12, (7,)), "offsets": torch.tensor([0, 3, 5])}

"""A model with a memory: the first question is fine, the second one meets what was remembered.

`inputs` gives a function that asks twice. The first answer is remembered on the last card; the
second question's embedding, on the first card, is added to it.
"""

import torch
from torch import nn


class Remembering(nn.Module):
    def __init__(self, vocab=20, width=6):
        super().__init__()
        self.memory = None
        self.embed = nn.Embedding(vocab, width)
        self.body = nn.GRU(width, width, batch_first=True)

    def forward(self, ids):
        h = self.embed(ids)
        if self.memory is not None:
            h = h + self.memory  # fault: mixed-devices
        h, last = self.body(h)
        self.memory = last.transpose(0, 1)
        return h


PLACEMENT = {"embed": 0, "body": 1}
TRAIN = False
UNJUDGED = "its inputs are a function"


def build():
    return Remembering()


def twice(model):
    device = model.embed.weight.device
    for _ in range(2):
        out = model(torch.randint(0, 20, (1, 4), device=device))
    return out


def inputs():
    return twice

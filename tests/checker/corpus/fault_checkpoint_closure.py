"""Non-re-entrant checkpointing of a local function that closes over a tensor of the first card.

`checkpoint` runs `segment`, which adds the embedding's output (cuda:0) to the block's (cuda:1).
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Embedding(15, width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, ids):
        h0 = self.embed(ids)

        def segment(h):
            h = self.second(torch.relu(self.first(h)))
            return torch.add(h, h0)  # fault: mixed-devices

        out = checkpoint(segment, h0, use_reentrant=False)
        return {"loss": out.square().mean()}


PLACEMENT = {"embed": 0, "first": 0, "second": 1}
TRAIN = True


def build():
    return Model()


def inputs():
    return {"ids": torch.randint(0, 15, (2, 3))}

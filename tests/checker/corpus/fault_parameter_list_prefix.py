"""Prefix tuning: one learned prefix per layer, all in a `ParameterList` on cuda:0.

The list belongs to the model's root; the second layer's states are on cuda:1 when its prefix is
concatenated with them.
"""

import torch
from torch import nn


class PrefixTuned(nn.Module):
    def __init__(self, width=8, depth=2, prefix=3):
        super().__init__()
        self.prefixes = nn.ParameterList(torch.randn(1, prefix, width) for _ in range(depth))
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 16, dropout=0.0, batch_first=True)
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 20)
        self.embed.requires_grad_(False)

    def forward(self, ids):
        h = self.embed(ids)
        for prefix, layer in zip(self.prefixes, self.layers, strict=True):
            h = torch.cat((prefix.expand(h.shape[0], -1, -1), h), 1)  # fault: mixed-devices
            h = layer(h)[:, prefix.shape[1] :]
        return self.head(h).logsumexp(-1).mean()


PLACEMENT = {"prefixes": 0, "embed": 1, "layers.0": 1, "layers.1": 0, "head": 0}
TRAIN = True


def build():
    return PrefixTuned()


def inputs():
    return (torch.randint(0, 20, (2, 4)),)

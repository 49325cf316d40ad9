"""A vision-language model that splices with `masked_scatter`.

The features come from a tower on cuda:1; embeddings and mask are on cuda:0. The tower runs last
before the splice, yet it is the embeddings that are written into.
"""

import torch
from torch import nn


class PatchTower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.norm = nn.LayerNorm(width)
        self.merge = nn.Linear(width, width)

    def forward(self, pixels):
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        return self.merge(self.norm(x)).flatten(0, 1)


class Spliced(nn.Module):
    image_token_id = 7

    def __init__(self, width=16):
        super().__init__()
        self.visual = PatchTower(width)
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 40)

    def merge(self, input_ids, embeds, features):
        mask = (input_ids == self.image_token_id).unsqueeze(-1).expand_as(embeds)
        return embeds.masked_scatter(mask, features)  # fault: mixed-devices

    def forward(self, input_ids, pixel_values):
        embeds = self.embed(input_ids)
        h = self.merge(input_ids, embeds, self.visual(pixel_values))
        for layer in self.layers:
            h = layer(h).relu()
        return self.head(h)


PLACEMENT = {"embed": "cuda:0", "visual": "cuda:1", "layers.0": 0, "layers.1": 1, "head": 1}
TRAIN = False


def build():
    return Spliced()


def inputs():
    ids = torch.tensor([[7, 7, 7, 7, 1, 2]])
    return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 8, 8)}

"""Image features go to the embeddings before they are spliced in, in two ways."""

import torch
from torch import nn


class VisionLanguage(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.visual = nn.Linear(12, width)
        self.embed = nn.Embedding(16, width)
        self.decoder = nn.Linear(width, width)

    def forward(self, input_ids, patches):
        features = self.visual(patches)
        embeds = self.embed(input_ids)
        mask = (input_ids == 7).to(embeds.device)
        features = features.to(embeds.device, embeds.dtype)
        spliced = embeds.masked_scatter(mask.unsqueeze(-1).expand_as(embeds), features)
        again = embeds.clone()
        again[mask] = features
        return self.decoder(spliced + again)


PLACEMENT = {"embed": 0, "visual": 1, "decoder": 1}
TRAIN = False


def build():
    return VisionLanguage()


def inputs():
    return {"input_ids": torch.tensor([[7, 7, 1, 2]]), "patches": torch.randn(2, 12)}

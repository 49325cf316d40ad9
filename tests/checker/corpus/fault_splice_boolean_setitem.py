"""A vision-language model that writes image features over the placeholders' embeddings.

The tower lies on cuda:1, the embeddings on cuda:0: `embeds[mask] = features` is an `index_put_`
whose values are on another card than the tensor that it writes into.
"""

import torch
from torch import nn

IMAGE_TOKEN = 31


class VisionLanguage(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(32, width)
        self.visual = nn.Sequential(nn.Linear(48, width), nn.GELU(), nn.Linear(width, width))
        self.decoder = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
        self.lm_head = nn.Linear(width, 32, bias=False)

    def forward(self, input_ids, patches):
        embeds = self.embed_tokens(input_ids)
        features = self.visual(patches)
        mask = input_ids == IMAGE_TOKEN
        embeds = embeds.clone()
        embeds[mask] = features.to(embeds.dtype)  # fault: in-place
        return self.lm_head(self.decoder(embeds))


PLACEMENT = {"embed_tokens": 0, "visual": 1, "decoder": 1, "lm_head": 1}
TRAIN = False


def build():
    return VisionLanguage()


def inputs():
    ids = torch.tensor([[1, 31, 31, 4, 5, 31]])
    return {"input_ids": ids, "patches": torch.randn(3, 48)}

"""PyTorch's encoder stack in evaluation mode, with padding: its own fast path."""

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, vocab=12, width=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, padding_idx=0)
        layer = nn.TransformerEncoderLayer(width, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 3)

    @torch.no_grad()
    def forward(self, ids):
        h = self.encoder(self.embed(ids), src_key_padding_mask=ids == 0)
        return self.head(h.mean(1))


PLACEMENT = {"embed": 0, "encoder.layers.0": 0, "encoder.layers.1": 1, "head": 1}
TRAIN = False


def build():
    return Classifier().eval()


def inputs():
    return (torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]),)

"""ELMo-like scalar mixing: the outputs of all layers are stacked and weighted.

The layers lie on two cards, and `torch.stack` takes all of their outputs at once. The mixing
weights belong to the model, on cuda:1, where the stack then is.
"""

import torch
from torch import nn


class ScalarMix(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(num_layers))

    def forward(self, stacked):
        share = self.weights.softmax(0)
        return torch.einsum("l,lbtd->btd", share, stacked)


class Mixed(nn.Module):
    def __init__(self, vocab=32, width=16, num_layers=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 32, dropout=0.0, batch_first=True)
            for _ in range(num_layers)
        )
        self.mix = ScalarMix(num_layers)

    def forward(self, input_ids):
        h = self.embed(input_ids)
        outputs = []
        for layer in self.layers:
            h = layer(h)
            outputs.append(h)
        return self.mix(torch.stack(outputs))  # fault: mixed-devices


PLACEMENT = {
    "embed": "cuda:0",
    "layers.0": "cuda:0",
    "layers.1": "cuda:0",
    "layers.2": "cuda:1",
    "layers.3": "cuda:1",
    "mix": "cuda:1",
}
TRAIN = False


def build():
    return Mixed()


def inputs():
    return {"input_ids": torch.randint(0, 32, (2, 5))}

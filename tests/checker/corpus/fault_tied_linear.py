"""A GPT that ties its head by hand: `F.linear` with the embedding's weight.

The last hidden states are on cuda:1, the tied weight on cuda:0.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class TiedGPT(nn.Module):
    def __init__(self, vocab=50, width=16, depth=2):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.h = nn.ModuleList(Block(width) for _ in range(depth))
        self.ln_f = nn.LayerNorm(width)

    def forward(self, idx):
        x = self.wte(idx)
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)  # fault: mixed-devices


PLACEMENT = {"wte": "cuda:0", "h.0": "cuda:0", "h.1": "cuda:1", "ln_f": "cuda:1"}
TRAIN = False


def build():
    return TiedGPT()


def inputs():
    return (torch.randint(0, 50, (1, 6)),)

"""Prefill is fine; decoding concatenates the new state with a summary kept on the first card.

The first pass takes another branch, so that the fault shows from the second step on.
"""

import torch
from torch import nn


class Summarising(nn.Module):
    def __init__(self, vocab=14, width=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(2 * width, vocab)

    def step(self, ids, summary):
        embedded = self.embed(ids)
        h, _ = self.body(embedded)
        if summary is None:
            both = torch.cat((h, torch.zeros_like(h)), -1)
        else:
            both = torch.cat((h, summary), -1)  # fault: mixed-devices
        return self.head(both), embedded.mean(1, keepdim=True)

    def forward(self, ids):
        logits, summary = self.step(ids, None)
        for _ in range(3):
            logits, summary = self.step(logits[:, -1:].argmax(-1), summary)
        return logits


PLACEMENT = {"embed": 0, "body": 1, "head": 1}
TRAIN = False


def build():
    return Summarising()


def inputs():
    return (torch.randint(0, 14, (2, 5)),)

"""Labels are sent to card 0 with `.to(0)`, where the logits aren't.

The head is on cuda:1, so the loss gets its target from another card.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Tagger(nn.Module):
    def __init__(self, vocab=25, width=8, tags=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.lstm = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, tags)

    def forward(self, ids, labels):
        h, _ = self.lstm(self.embed(ids))
        logits = self.head(h)
        labels = labels.to(0)  # origin
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # fault: hard-coded-device


PLACEMENT = {"embed": 0, "lstm": 0, "head": 1}
TRAIN = True


def build():
    return Tagger()


def inputs():
    return {"ids": torch.randint(0, 25, (2, 6)), "labels": torch.randint(0, 4, (2, 6))}

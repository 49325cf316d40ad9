"""Features travel in a NamedTuple, out of two encoders on two cards, into a cosine similarity.

The tuple is put together by the model and read by the model: no placed module in between.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Pair(NamedTuple):
    query: Tensor
    document: Tensor

    def score(self) -> Tensor:
        return F.cosine_similarity(self.query, self.document)  # fault: mixed-devices


class Retriever(nn.Module):
    def __init__(self, vocab=40, width=8):
        super().__init__()
        self.query_encoder = nn.EmbeddingBag(vocab, width)
        self.document_encoder = nn.EmbeddingBag(vocab, width)

    def encode(self, query: Tensor, document: Tensor) -> Pair:
        return Pair(self.query_encoder(query), self.document_encoder(document))

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        return self.encode(query, document).score()


PLACEMENT = {"query_encoder": "cuda:0", "document_encoder": "cuda:1"}
TRAIN = False


def build():
    return Retriever()


def inputs():
    return {
        "query": torch.randint(0, 40, (3, 4)),
        "document": torch.randint(0, 40, (3, 9)),
    }

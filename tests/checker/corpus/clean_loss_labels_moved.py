"""The causal-LM loss as it should be: labels go to the logits."""

import torch
import torch.nn.functional as F
from torch import nn


class CausalLM(nn.Module):
    def __init__(self, vocab=30, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(2))
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids, labels):
        h = self.embed(input_ids)
        for layer in self.layers:
            h, _ = layer(h)
        logits = self.lm_head(h).float()
        labels = labels.to(logits.device)
        shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


PLACEMENT = {"embed": 0, "layers.0": 0, "layers.1": 1, "lm_head": 1}
TRAIN = True


def build():
    return CausalLM()


def inputs():
    ids = torch.randint(0, 30, (2, 6))
    return {"input_ids": ids, "labels": ids.clone()}

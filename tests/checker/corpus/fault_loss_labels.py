"""The causal-LM loss: labels stay on the inputs' card, logits come from the last one.

Shifted logits on cuda:1, shifted labels on cuda:0, and `CrossEntropyLoss` over both.
"""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class CausalOutput:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class CausalLM(nn.Module):
    def __init__(self, vocab=30, width=12):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.GRU(width, width, batch_first=True) for _ in range(2))
        self.lm_head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids, labels=None):
        h = self.embed(input_ids)
        for layer in self.layers:
            h, _ = layer(h)
        logits = self.lm_head(h)
        if labels is None:
            return CausalOutput(logits)
        shift_logits = logits[..., :-1, :].contiguous().view(-1, logits.size(-1))
        shift_labels = labels[..., 1:].contiguous().view(-1)
        loss = nn.CrossEntropyLoss()(shift_logits, shift_labels)  # fault: mixed-devices
        return CausalOutput(logits, loss)


PLACEMENT = {"embed": 0, "layers.0": 0, "layers.1": 1, "lm_head": 1}
TRAIN = True


def build():
    return CausalLM()


def inputs():
    ids = torch.randint(0, 30, (2, 6))
    return {"input_ids": ids, "labels": ids.clone()}

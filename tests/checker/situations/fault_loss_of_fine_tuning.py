"""A GLM that is fine-tuned over four cards: labels wait on cuda:1, logits come from cuda:3.

The embedding is on cuda:1, so inputs and labels are there; the cross entropy gets both.
"""

from dataclasses import dataclass

import torch
from helper_glm import Layer, RMSNorm, RotaryTable
from torch import Tensor, nn


@dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Backbone(nn.Module):
    def __init__(self, vocab: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.rotary_pos_emb = RotaryTable(width // heads // 2)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.final_layernorm = RMSNorm(width)

    def forward(self, input_ids: Tensor) -> Tensor:
        angles = self.rotary_pos_emb(0, input_ids.shape[1])
        h = self.embedding(input_ids)
        for layer in self.layers:
            h, _ = layer(h, angles, None)
        return self.final_layernorm(h)


class TunedGLM(nn.Module):
    def __init__(self, vocab: int = 40, width: int = 16, heads: int = 2, depth: int = 4) -> None:
        super().__init__()
        self.transformer = Backbone(vocab, width, heads, depth)
        self.output_layer = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        logits = self.output_layer(self.transformer(input_ids)).float()
        if labels is None:
            return Output(logits)
        ahead = logits[:, :-1].reshape(-1, logits.shape[-1])
        wanted = labels[:, 1:].reshape(-1)
        loss = nn.functional.cross_entropy(ahead, wanted, ignore_index=-100)  # fault: mixed-devices
        return Output(logits, loss)


HELPERS = ("helper_glm.py",)
PLACEMENT = {
    "transformer.embedding": "cuda:1",
    "transformer.rotary_pos_emb": "cuda:1",
    "transformer.layers.0": "cuda:1",
    "transformer.layers.1": "cuda:0",
    "transformer.layers.2": "cuda:2",
    "transformer.layers.3": "cuda:3",
    "transformer.final_layernorm": "cuda:3",
    "output_layer": "cuda:3",
}
TRAIN = True
build = TunedGLM


def inputs():
    ids = torch.randint(0, 40, (2, 7))
    labels = ids.clone()
    labels[:, :2] = -100
    return {"input_ids": ids, "labels": labels}

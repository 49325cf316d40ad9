"""A GLM for long texts that keeps the cache of all layers in one tensor at prefill.

The layers lie on two cards. After the first half the tensor is on cuda:0, and the keys and values
of the next layer, on cuda:1, can't be concatenated with it. While decoding each layer's part stays
with the layer.
"""

import torch
from helper_glm import Layer, RMSNorm, RotaryTable
from torch import Tensor, nn


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.final_layernorm = RMSNorm(width)

    def forward(self, x: Tensor, angles: Tensor, caches=None):
        kept = ()
        for number, layer in enumerate(self.layers):
            x, kv = layer(x, angles, None if caches is None else caches[number])
            if caches is not None:
                kept = (*kept, kv)
            elif number == 0:
                kept = kv.unsqueeze(0)
            else:
                kept = torch.cat((kept, kv.unsqueeze(0)), dim=0)  # fault: mixed-devices
        return self.final_layernorm(x), kept


class LongGLM(nn.Module):
    def __init__(self, vocab: int = 40, width: int = 16, heads: int = 2, depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.rotary_pos_emb = RotaryTable(width // heads // 2)
        self.encoder = Encoder(width, heads, depth)
        self.output_layer = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: Tensor, new_tokens: int = 3) -> Tensor:
        caches, past = None, 0
        for _ in range(1 + new_tokens):
            angles = self.rotary_pos_emb(past, input_ids.shape[1])
            h, caches = self.encoder(self.embedding(input_ids), angles, caches)
            logits = self.output_layer(h)
            past, input_ids = past + input_ids.shape[1], logits[:, -1:].argmax(-1)
        return logits


HELPERS = ("helper_glm.py",)
PLACEMENT = {
    "embedding": "cuda:0",
    "rotary_pos_emb": "cuda:0",
    "encoder.layers.0": "cuda:0",
    "encoder.layers.1": "cuda:0",
    "encoder.layers.2": "cuda:1",
    "encoder.layers.3": "cuda:1",
    "encoder.final_layernorm": "cuda:1",
    "output_layer": "cuda:1",
}
TRAIN = False
build = LongGLM


def inputs():
    return {"input_ids": torch.randint(0, 40, (1, 6))}

"""A GLM that sees: a tower on cuda:1 and cuda:2 that is cut in a block, embeddings on cuda:0.

The second block's attention is on cuda:1 and its MLP on cuda:2, so that the residual meets the
MLP's output across cards. Then the image's features, on cuda:2, take the place of the placeholders
among the text's embeddings on cuda:0.
"""

import torch
from helper_glm import Layer, RMSNorm, RotaryTable
from torch import Tensor, nn

BEGIN = 1
NUM_FEATURES = 4


class VisionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.post_attention_layernorm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.post_attention_layernorm(x))  # fault: mixed-devices


class Tower(nn.Module):
    def __init__(self, width: int, text_width: int) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(VisionBlock(width) for _ in range(3))
        self.adapter = nn.Linear(width, text_width)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embedding(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.adapter(x)  # [images, features, width]


class SeeingGLM(nn.Module):
    def __init__(self, vocab: int = 40, width: int = 16, heads: int = 2, depth: int = 2) -> None:
        super().__init__()
        self.vision = Tower(12, width)
        self.embedding = nn.Embedding(vocab, width)
        self.rotary_pos_emb = RotaryTable(width // heads // 2)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(depth))
        self.final_layernorm = RMSNorm(width)
        self.output_layer = nn.Linear(width, vocab, bias=False)

    def spliced(self, input_ids: Tensor, embeds: Tensor, features: Tensor) -> Tensor:
        rows = []
        for ids, row, image in zip(input_ids, embeds, features, strict=True):
            start = int((ids == BEGIN).nonzero()[0]) + 1
            after = row[start + NUM_FEATURES :]
            rows.append(torch.cat((row[:start], image, after)))  # fault: mixed-devices
        return torch.stack(rows)

    def forward(self, input_ids: Tensor, images: Tensor) -> Tensor:
        features = self.vision(images)
        h = self.spliced(input_ids, self.embedding(input_ids), features)
        angles = self.rotary_pos_emb(0, h.shape[1])
        for layer in self.layers:
            h, _ = layer(h, angles, None)
        return self.output_layer(self.final_layernorm(h))


HELPERS = ("helper_glm.py",)
PLACEMENT = {
    "vision.patch_embedding": "cuda:1",
    "vision.blocks.0": "cuda:1",
    "vision.blocks.1.input_layernorm": "cuda:1",
    "vision.blocks.1.attention": "cuda:1",
    "vision.blocks.1.post_attention_layernorm": "cuda:1",
    "vision.blocks.1.mlp": "cuda:2",
    "vision.blocks.2": "cuda:2",
    "vision.adapter": "cuda:2",
    "embedding": "cuda:0",
    "rotary_pos_emb": "cuda:0",
    "layers.0": "cuda:0",
    "layers.1": "cuda:1",
    "final_layernorm": "cuda:1",
    "output_layer": "cuda:1",
}
TRAIN = False
build = SeeingGLM


def inputs():
    ids = torch.randint(2, 40, (2, 9))
    ids[:, 2] = BEGIN
    return {"input_ids": ids, "images": torch.randn(2, 3, 8, 8)}

"""CLIP: two towers on two cards meet in the matrix product of their features.

Each tower's features stay on its card, so `image @ text.t()` multiplies matrices of two cards. The
loss's labels are made on the device of the logits, which is right.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Tower(nn.Module):
    def __init__(self, inside, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inside, width), nn.GELU(), nn.LayerNorm(width))
        self.projection = nn.Linear(width, 8, bias=False)

    def forward(self, x):
        return F.normalize(self.projection(self.body(x)), dim=-1)


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = Tower(24, 16)
        self.textual = Tower(10, 16)

    def forward(self, image, text):
        image_features = self.visual(image)
        text_features = self.textual(text)
        logits = 10.0 * image_features @ text_features.t()  # fault: mixed-devices
        labels = torch.arange(logits.shape[0], device=logits.device)
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        return {"loss": loss, "logits": logits}


PLACEMENT = {"visual": "cuda:0", "textual": "cuda:1"}
TRAIN = True


def build():
    return Clip()


def inputs():
    return {"image": torch.randn(4, 24), "text": torch.randn(4, 10)}

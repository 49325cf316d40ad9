"""Two towers on two cards whose features meet on one of them, with a learned temperature."""

import torch
import torch.nn.functional as F
from torch import nn


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(10, 8), nn.Tanh())
        self.textual = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.logit_scale = nn.Parameter(torch.tensor(0.0))

    def forward(self, image, text):
        image, text = (
            F.normalize(self.visual(image), dim=-1),
            F.normalize(self.textual(text), dim=-1),
        )
        image = image.to(text.device)
        logits = self.logit_scale.exp().to(text.device) * image @ text.t()
        return F.cross_entropy(logits, torch.arange(len(logits)).to(logits.device))


PLACEMENT = {"visual": 0, "textual": 1, "logit_scale": 0}
TRAIN = True


def build():
    return Towers()


def inputs():
    return {"image": torch.randn(3, 10), "text": torch.randn(3, 6)}

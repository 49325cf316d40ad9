"""Three towers on three cards, fused in one call: every input is somewhere else."""

import torch
from torch import nn


class Trimodal(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.audio, self.video = nn.Linear(3, width), nn.Linear(5, width)
        self.text = nn.Embedding(7, width)
        self.fuse = nn.Bilinear(width, width, 2)

    def forward(self, audio, video, text):
        parts = self.audio(audio), self.video(video), self.text(text)
        total = torch.stack(parts).sum(0)  # fault: mixed-devices
        scores = torch.einsum("bi,bi,bi->b", *parts)  # fault: mixed-devices
        return self.fuse(total, parts[0]), scores


PLACEMENT = {"audio": 0, "video": 1, "text": 2, "fuse": 2}
TRAIN = False


def build():
    return Trimodal()


def inputs():
    return {
        "audio": torch.randn(2, 3),
        "video": torch.randn(2, 5),
        "text": torch.randint(0, 7, (2,)),
    }

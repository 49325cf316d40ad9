"""Results are brought to the CPU and decoded there with plain CPU tables."""

import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.anchors = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]
        self.backbone = nn.Conv2d(3, 4, 3, 2, 1)
        self.heads = nn.ModuleList(nn.Conv2d(4, 2, 1) for _ in range(2))

    def forward(self, image):
        h = self.backbone(image).relu()
        found = []
        for head, anchor in zip(self.heads, self.anchors, strict=True):
            raw = head(h).flatten(2).mT.cpu()
            grid = torch.arange(raw.shape[1]).float()[:, None]
            found.append(raw.exp() * anchor + grid)
        return torch.cat(found, dim=1)


PLACEMENT = {"backbone": 0, "heads.0": 0, "heads.1": 1}
TRAIN = False


def build():
    return Detector()


def inputs():
    return (torch.randn(1, 3, 8, 8),)

"""Images are normalised with `torch.tensor([...])` constants inside forward.

Both constants are CPU vectors: the subtraction fails, and the division after it on its own.
"""

import torch
from torch import nn


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(6, 3)

    def scaled(self, pixels):
        mean = torch.tensor([0.48, 0.45, 0.40]).view(1, 3, 1, 1)
        deviation = torch.tensor([0.22, 0.22, 0.22]).view(1, 3, 1, 1)
        pixels = pixels - mean  # fault: mixed-devices
        return pixels / deviation  # fault: mixed-devices

    def forward(self, pixels):
        return self.classifier(self.features(self.scaled(pixels)).flatten(1))


PLACEMENT = {"features": 0, "classifier": 1}
TRAIN = False


def build():
    return Normalised()


def inputs():
    return (torch.rand(2, 3, 8, 8),)

"""Outputs in nested dataclasses and dictionaries, taken apart again by the model."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass
class Branch:
    hidden: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Outputs:
    image: Branch
    text: Branch

    @property
    def gap(self):
        return torch.dist(self.image.hidden, self.text.hidden)  # fault: mixed-devices


class Encoder(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.fc = nn.Linear(inside, 4)

    def forward(self, x):
        h = self.fc(x)
        return Branch(h, {"norm": h.norm(dim=-1)})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Encoder(6), Encoder(3)

    def forward(self, image, text):
        outputs = Outputs(self.image(image), self.text(text))
        norms = [part.extras["norm"] for part in (outputs.image, outputs.text)]
        return outputs.gap, torch.stack(norms).mean()  # fault: mixed-devices


PLACEMENT = {"image": 0, "text": 1}
TRAIN = False


def build():
    return Model()


def inputs():
    return {"image": torch.randn(2, 6), "text": torch.randn(2, 3)}

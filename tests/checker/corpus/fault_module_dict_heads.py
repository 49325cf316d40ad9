"""Task heads in a `ModuleDict`, spread over the cards, whose outputs are concatenated.

Each head brings its argument to its own card and leaves its output there.
"""

import torch
from torch import nn


class MultiTask(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, width), nn.SiLU())
        self.heads = nn.ModuleDict(
            {
                "age": nn.Linear(width, 1),
                "income": nn.Linear(width, 2),
                "region": nn.Linear(width, 3),
            }
        )

    def forward(self, x):
        h = self.trunk(x)
        outputs = {task: head(h) for task, head in self.heads.items()}
        return torch.cat(list(outputs.values()), dim=-1)  # fault: mixed-devices


PLACEMENT = {
    "trunk": "cuda:0",
    "heads.age": "cuda:0",
    "heads.income": "cuda:1",
    "heads.region": "cuda:1",
}
TRAIN = False


def build():
    return MultiTask()


def inputs():
    return {"x": torch.randn(3, 4)}

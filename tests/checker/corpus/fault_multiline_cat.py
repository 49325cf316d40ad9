"""A call over many lines: all of DenseNet's earlier features are concatenated.

The call begins on the marked line, and that is the line that Python names.
"""

import torch
from torch import nn


class Dense(nn.Module):
    def __init__(self, growth=3):
        super().__init__()
        self.a = nn.Conv1d(2, growth, 3, padding=1)
        self.b = nn.Conv1d(growth, growth, 3, padding=1)
        self.c = nn.Conv1d(2 * growth, growth, 3, padding=1)
        self.last = nn.Conv1d(3 * growth, 1, 1)

    def forward(self, x):
        a = self.a(x).relu()
        b = self.b(a).relu()
        c = self.c(
            torch.cat(  # fault: mixed-devices
                [
                    a,
                    b,
                ],
                dim=1,
            )
        ).relu()
        together = torch.cat(  # fault: mixed-devices
            (
                a,
                b,
                c,
            ),
            dim=1,
        )
        return self.last(together)


PLACEMENT = {"a": 0, "b": 1, "c": 1, "last": 1}
TRAIN = False


def build():
    return Dense()


def inputs():
    return (torch.randn(1, 2, 8),)

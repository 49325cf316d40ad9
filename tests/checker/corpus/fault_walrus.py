"""A walrus in a condition: the norm of the update is divided by that of the state.

The update comes from cuda:1; state and threshold are on cuda:0. A GPU scalar of another card does
not mix, and the division fails before its result is ever compared.
"""

import torch
from torch import nn


class Fixpoint(nn.Module):
    def __init__(self, width=5, steps=3):
        super().__init__()
        self.steps = steps
        self.inject = nn.Linear(width, width)
        self.update = nn.Linear(width, width)

    def forward(self, x):
        z = self.inject(x).tanh()
        for _ in range(self.steps):
            new = self.update(z).tanh()
            if (change := new.norm() / z.norm()) < 1e-6:  # fault: mixed-devices
                return z * change
            z = new.to(z.device)
        return z


PLACEMENT = {"inject": 0, "update": 1}
TRAIN = False


def build():
    return Fixpoint()


def inputs():
    return (torch.randn(2, 5),)

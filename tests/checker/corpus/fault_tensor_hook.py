"""A tensor hook rescales the gradient with a parameter of another card.

Forward is fine. In backward the gradient of the second stage's input is on cuda:1, the scale that
the lambda reads on cuda:0.
"""

import torch
from torch import nn


class Second(nn.Module):
    def __init__(self, width, owner):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.scale = lambda: owner.grad_scale

    def forward(self, x):
        h = self.fc(x)
        if h.requires_grad:
            h.register_hook(lambda grad: grad * self.scale())  # fault: mixed-devices
        return h.tanh()


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.register_buffer("grad_scale", torch.linspace(0.5, 1.5, width))
        self.first = nn.Linear(width, width)
        self.second = Second(width, self)

    def forward(self, x):
        return {"loss": self.second(self.first(x)).pow(2).mean()}


PLACEMENT = {"grad_scale": 0, "first": 0, "second": 1}
TRAIN = True


def build():
    return Net()


def inputs():
    return {"x": torch.randn(3, 6)}

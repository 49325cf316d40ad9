"""A full backward hook scales the gradient with a tensor on the CPU."""

import torch
from torch import nn


class Scaling:
    def __init__(self, width):
        self.by = torch.linspace(0.5, 1.0, width)

    def __call__(self, module, grad_input, grad_output):
        (grad,) = grad_input
        return (grad * self.by,)  # fault: mixed-devices


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.b(self.a(x).tanh()).square().mean()


PLACEMENT = {"a": 0, "b": 1}
TRAIN = True


def build():
    model = Model()
    model.b.register_full_backward_hook(Scaling(4))
    return model


def inputs():
    return (torch.randn(2, 4),)

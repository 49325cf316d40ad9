"""An operator registered with `torch.library.custom_op`, called with tensors of two cards."""

import torch
from torch import nn


@torch.library.custom_op("duoka_corpus::blend", mutates_args=())
def blend(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return 0.5 * a + 0.5 * b


@blend.register_fake
def _(a, b):
    return torch.empty_like(a)


class Model(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return blend(self.a(x), self.b(x))  # fault: mixed-devices


PLACEMENT = {"a": 0, "b": 1}
TRAIN = False


def build():
    return Model().requires_grad_(False)


def inputs():
    return (torch.randn(2, 4),)

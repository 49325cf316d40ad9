"""`torch.func` and `vmap` on one card: per-sample gradients of a linear layer."""

import torch
from torch import nn
from torch.func import functional_call, grad, vmap


class PerSample(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        h = self.embed(x).to(self.head.weight.device).detach()
        parameters = {name: p.detach() for name, p in self.head.named_parameters()}

        def loss(weights, row):
            return functional_call(self.head, weights, (row,)).square().sum()

        return vmap(grad(loss), in_dims=(None, 0))(parameters, h)["weight"].norm(dim=(1, 2))


PLACEMENT = {"embed": 0, "head": 1}
TRAIN = False


def build():
    return PerSample()


def inputs():
    return (torch.randn(5, 3),)

"""Hooks of all kinds that follow the tensors that they get."""

import torch
from torch import nn


def steer(vector):
    return lambda module, args, output: output + vector.to(output)


def centred(module, args):
    return (args[0] - args[0].mean(-1, keepdim=True),)


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
            if x.requires_grad:
                x.register_hook(lambda grad: grad.clamp(-1, 1) * 0.5)
        return x.pow(2).mean()


PLACEMENT = {"layers.0": 0, "layers.1": 1, "layers.2": 1}
TRAIN = True


def build():
    net = Net()
    net.layers[2].register_forward_hook(steer(torch.randn(6)))
    net.layers[1].register_forward_pre_hook(centred)
    return net


def inputs():
    return (torch.randn(2, 6),)

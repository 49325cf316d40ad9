"""Every way to write a hard-coded device, in a layer that happens to lie on the first card."""

import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(x)
        y = y + torch.ones(self.width).to("cuda")  # warning: hard-coded-device
        y = y + torch.ones(self.width).to(device="cuda:0")  # warning: hard-coded-device
        y = y + torch.ones(self.width).cuda(0)  # warning: hard-coded-device
        y = y + torch.ones(self.width).to(torch.device("cuda", 0))  # warning: hard-coded-device
        y = y + torch.as_tensor([1.0], device="cuda")  # warning: hard-coded-device
        y = y + torch.tensor([1.0], device=0)  # warning: hard-coded-device
        y = y + torch.empty_like(y, device="cuda").zero_()  # warning: hard-coded-device
        return y + y.new_zeros(self.width, device="cuda:0")  # warning: hard-coded-device


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(Layer(4), nn.Linear(4, 4))


def inputs():
    return (torch.randn(2, 4),)

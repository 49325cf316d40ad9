"""A module-level `DEVICE = torch.device("cuda", 0)` that the decoder's loop uses.

The start state is made on cuda:0; the cell runs on cuda:1.
"""

import torch
from torch import nn

DEVICE = torch.device("cuda", 0)


class Decoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        self.recur = nn.Linear(2 * width, width)

    def forward(self, memory):
        state = torch.zeros((memory.shape[0], self.width), device=DEVICE)  # origin
        for step in range(memory.shape[1]):
            both = torch.cat((memory[:, step], state), dim=1)  # fault: hard-coded-device
            state = torch.tanh(self.recur(both))
        return state


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(nn.Conv1d(4, 6, 1), Decoder(6))


def inputs():
    return (torch.randn(2, 4, 6),)

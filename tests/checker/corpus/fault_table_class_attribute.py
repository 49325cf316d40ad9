"""A window function that is an attribute of the class.

`Spectral.window` is made on the CPU at import; both instances multiply GPU frames with it.
"""

import torch
from torch import nn


class Spectral(nn.Module):
    window = torch.hann_window(8)

    def __init__(self, bins):
        super().__init__()
        self.mel = nn.Linear(8, bins)

    def forward(self, audio):
        frames = audio.unfold(-1, 8, 4)
        return self.mel(frames * self.window)  # fault: mixed-devices


class Audio(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine, self.coarse = Spectral(6), Spectral(3)

    def forward(self, audio):
        return self.fine(audio), self.coarse(audio)


PLACEMENT = {"fine": 0, "coarse": 1}
TRAIN = False


def build():
    return Audio()


def inputs():
    return (torch.randn(2, 32),)

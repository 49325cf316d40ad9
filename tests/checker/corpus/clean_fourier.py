"""Fourier features: complex numbers, FFT and back."""

import torch
from torch import nn


class SpectralConv(nn.Module):
    def __init__(self, channels, modes):
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, dtype=torch.cfloat))

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        out = torch.zeros_like(spectrum)
        low = spectrum[..., : self.modes]
        out[..., : self.modes] = torch.einsum("bim,iom->bom", low, self.weight)
        return torch.fft.irfft(out, n=x.size(-1))


class Operator(nn.Module):
    def __init__(self, channels=4):
        super().__init__()
        self.lift = nn.Conv1d(1, channels, 1)
        self.spectral = nn.ModuleList(SpectralConv(channels, 3) for _ in range(2))
        self.local = nn.ModuleList(nn.Conv1d(channels, channels, 1) for _ in range(2))

    def forward(self, x):
        x = self.lift(x)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = nn.functional.gelu(spectral(x) + local(x))
        return x


PLACEMENT = {"lift": 0, "spectral.0": 0, "local.0": 0, "spectral.1": 1, "local.1": 1}
TRAIN = False


def build():
    return Operator()


def inputs():
    return (torch.randn(2, 1, 16),)

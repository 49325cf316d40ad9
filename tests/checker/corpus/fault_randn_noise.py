"""A variational autoencoder whose noise is drawn on the CPU.

`torch.randn(mu.shape)` has no device, and is multiplied with a GPU deviation.
"""

import torch
from torch import nn


class VAE(nn.Module):
    def __init__(self, inside=12, latent=3):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inside, 16), nn.ReLU())
        self.mu = nn.Linear(16, latent)
        self.log_var = nn.Linear(16, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, 16), nn.ReLU(), nn.Linear(16, inside))

    def reparameterise(self, mu, log_var):
        std = torch.exp(0.5 * log_var)
        return mu + std * torch.randn(mu.shape)  # fault: mixed-devices

    def forward(self, x):
        h = self.encoder(x)
        mu, log_var = self.mu(h), self.log_var(h)
        out = self.decoder(self.reparameterise(mu, log_var))
        kl = -0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).mean()
        return {"out": out, "loss": (out - x.to(out.device)).pow(2).mean() + kl.to(out.device)}


PLACEMENT = {"encoder": 0, "mu": 0, "log_var": 0, "decoder": 1}
TRAIN = True


def build():
    return VAE()


def inputs():
    return (torch.randn(4, 12),)

"""A prior of `torch.distributions` made in `__init__`: its parameters stay on the CPU.

`log_prob` subtracts its mean, on the CPU, from a sample of a GPU; the sample itself is fine.
"""

import torch
from torch import nn
from torch.distributions import Normal


class Flow(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.prior = Normal(torch.zeros(width), torch.ones(width), validate_args=False)
        self.encoder, self.decoder = nn.Linear(5, 2 * width), nn.Linear(width, 5)

    def forward(self, x):
        mean, log_scale = self.encoder(x).chunk(2, -1)
        posterior = Normal(mean, log_scale.exp(), validate_args=False)
        z = posterior.rsample()
        ratio = posterior.log_prob(z) - self.prior.log_prob(z)  # fault: mixed-devices
        out = self.decoder(z)
        return {"loss": (out - x.to(out.device)).square().mean() + ratio.mean().to(out.device)}


PLACEMENT = {"encoder": 0, "decoder": 1}
TRAIN = True


def build():
    return Flow()


def inputs():
    return {"x": torch.randn(4, 5)}

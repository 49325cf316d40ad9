"""Distributions, their samples and divergences, all made of tensors of one card."""

import torch
from torch import nn
from torch.distributions import Categorical, Normal, kl_divergence


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head, self.value = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x):
        h = self.trunk(x).tanh()
        policy = Categorical(logits=self.head(h))
        action = policy.sample()
        mean, scale = self.value(h).chunk(2, -1)
        value = Normal(mean, scale.exp())
        prior = Normal(torch.zeros_like(mean), torch.ones_like(scale))
        loss = kl_divergence(value, prior).mean() - policy.log_prob(action).mean()
        return {"loss": loss - 0.01 * policy.entropy().mean()}


PLACEMENT = {"trunk": 0, "head": 1, "value": 1}
TRAIN = True


def build():
    return Agent()


def inputs():
    return {"x": torch.randn(4, 5)}

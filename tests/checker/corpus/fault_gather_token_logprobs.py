"""A policy-gradient head that gathers the log-probabilities of the actions.

The actions are an input and stay on cuda:0 with the trunk; the logits come from cuda:1.
`gather` wants its index on the logits' card.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Policy(nn.Module):
    def __init__(self, observations=6, actions=4):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(observations, 16), nn.Tanh())
        self.actor = nn.Linear(16, actions)
        self.critic = nn.Linear(16, 1)

    def forward(self, observation, action):
        h = self.trunk(observation)
        log_probs = F.log_softmax(self.actor(h), dim=-1)
        value = self.critic(h).squeeze(-1)
        chosen = log_probs.gather(-1, action.unsqueeze(-1))  # fault: mixed-devices
        return chosen.squeeze(-1), value


PLACEMENT = {"trunk": 0, "actor": 1, "critic": 1}
TRAIN = False


def build():
    return Policy()


def inputs():
    return {"observation": torch.randn(5, 6), "action": torch.randint(0, 4, (5,))}

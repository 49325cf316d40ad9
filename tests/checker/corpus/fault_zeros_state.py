"""A selective state-space scan that starts from `torch.zeros` on the CPU.

The first step mixes the CPU state with GPU decays; from then on the state is on the GPU, so the
line is at fault once a layer.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Mixer(nn.Module):
    def __init__(self, width, num_states=4):
        super().__init__()
        self.a_log = nn.Parameter(torch.rand(width, num_states))
        self.in_proj = nn.Linear(width, width)
        self.dt_proj = nn.Linear(width, width)
        self.bc_proj = nn.Linear(width, 2 * num_states)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x):
        u, dt = F.silu(self.in_proj(x)), F.softplus(self.dt_proj(x))
        b, c = self.bc_proj(x).chunk(2, dim=-1)
        decay = torch.exp(-dt.unsqueeze(-1) * self.a_log.exp())
        drive = (dt * u).unsqueeze(-1) * b.unsqueeze(2)
        state = torch.zeros(x.shape[0], *self.a_log.shape)
        outputs = []
        for step in range(x.shape[1]):
            state = state * decay[:, step] + drive[:, step]  # fault: mixed-devices
            outputs.append(torch.einsum("bdn,bn->bd", state, c[:, step]))
        return x + self.out_proj(torch.stack(outputs, dim=1))


PLACEMENT = {"0": "cuda:0", "1": "cuda:1"}
TRAIN = False


def build():
    return nn.Sequential(Mixer(6), Mixer(6))


def inputs():
    return (torch.randn(2, 4, 6),)

"""What `fault_helper_in_another_file` imports."""

import torch


def add_residual(branch, residual, *, scale=1.0):
    if scale != 1.0:
        branch = branch * scale
    return torch.add(residual, branch)  # fault: mixed-devices


def pooled(states, mask):
    weight = mask.to(states.device, states.dtype).unsqueeze(-1)
    return (states * weight).sum(1) / weight.sum(1)

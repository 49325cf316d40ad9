import torch


def causal_bias(hidden, past):
    tokens = hidden.shape[1]
    rows = torch.arange(past, past + tokens, device=hidden.device)
    columns = torch.arange(past + tokens, device=hidden.device)
    return torch.where(columns[None, :] <= rows[:, None], 0.0, -1e4)


def rotated(states):
    first, second = states.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)

"""Decompositions, solves and determinants on the second card."""

import torch
from torch import nn


class Whitening(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        y = self.fc(x)
        y = y - y.mean(0)
        cov = y.t() @ y / (len(y) - 1) + 0.1 * torch.eye(y.shape[1], device=y.device)
        factor = torch.linalg.cholesky(cov)
        white = torch.linalg.solve_triangular(factor, y.t(), upper=False).t()
        return white + torch.logdet(cov) + torch.linalg.matrix_norm(cov)


PLACEMENT = {"0": 0, "1": 1}
TRAIN = False


def build():
    return nn.Sequential(nn.Linear(3, 3), Whitening(3))


def inputs():
    return (torch.randn(8, 3),)

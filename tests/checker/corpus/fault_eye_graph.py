"""A graph convolution that adds self-loops with `torch.eye` on the CPU.

The adjacency matrix is an argument of the placed layer and thus on its card; `eye` isn't.
"""

import torch
from torch import nn


class GraphConv(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.lin = nn.Linear(inside, outside)

    def forward(self, nodes, adjacency):
        looped = adjacency + torch.eye(adjacency.shape[0])  # fault: mixed-devices
        degree = looped.sum(-1).rsqrt()
        normal = degree[:, None] * looped * degree[None, :]
        return normal @ self.lin(nodes)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GraphConv(5, 8)
        self.conv2 = GraphConv(8, 2)

    def forward(self, nodes, adjacency):
        return self.conv2(self.conv1(nodes, adjacency).relu(), adjacency)


PLACEMENT = {"conv1": "cuda:0", "conv2": "cuda:1"}
TRAIN = False


def build():
    return GCN()


def inputs():
    ring = torch.roll(torch.eye(6), 1, 0)
    return {"nodes": torch.randn(6, 5), "adjacency": ring + ring.t()}

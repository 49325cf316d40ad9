"""Two branches run in a pool of threads, as code for several GPUs does; both add a CPU ramp."""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn


class Branch(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        ramp = torch.linspace(0.0, 1.0, x.shape[-1])
        return self.fc(x) + ramp  # fault: mixed-devices


class Parallel(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.left, self.right = Branch(width), Branch(width)

    def forward(self, x):
        with ThreadPoolExecutor(max_workers=2) as pool:
            futures = [pool.submit(branch, x) for branch in (self.left, self.right)]
            first, second = (future.result() for future in futures)
        return first + second.to(first.device)


PLACEMENT = {"left": 0, "right": 1}
TRAIN = False
UNJUDGED = "a function mode sees one thread"


def build():
    return Parallel().requires_grad_(False)


def inputs():
    return (torch.randn(2, 4),)

"""Distillation: a frozen teacher on cuda:0 and a student on cuda:1.

`kl_div` takes the student's log-probabilities and the teacher's probabilities from two cards.
"""

import torch
import torch.nn.functional as F
from torch import nn


class Distilled(nn.Module):
    def __init__(self, classes=5, temperature=2.0):
        super().__init__()
        self.temperature = temperature
        self.teacher = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, classes))
        self.student = nn.Linear(8, classes)
        self.teacher.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            target = F.softmax(self.teacher(x) / self.temperature, dim=-1)
        log_probs = F.log_softmax(self.student(x) / self.temperature, dim=-1)
        loss = F.kl_div(log_probs, target, reduction="batchmean")  # fault: mixed-devices
        return {"loss": loss * self.temperature**2}


PLACEMENT = {"teacher": 0, "student": 1}
TRAIN = True


def build():
    return Distilled()


def inputs():
    return {"x": torch.randn(4, 8)}

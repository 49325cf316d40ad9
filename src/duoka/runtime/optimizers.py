"""Optimizers, for traced and checked training steps and for real training.

8-bit AdamW comes from bitsandbytes: its update is a single operator, which needs no memory beside
the states and runs on CUDA, the CPU and virtual GPUs; torchao's is compiled for each device.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import nn

from duoka import virtual
from duoka.base.quiet import quiet_libraries
from duoka.base.requirements import require_package
from duoka.forecast.workload import Optimizer


def make_optimizer(
    model: nn.Module, optimizer: Optimizer, *, lr: float = 1e-4, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """Make the optimizer for the trained parameters of a model in this process.

    Parameters
    ----------
    model : nn.Module
        Its parameters that require gradients are trained, except those on the meta device, which
        belong to other processes.
    optimizer : {"adamw", "adamw8bit", "adafactor", "sgd"}
    lr : float
        The learning rate; of Adafactor the largest change per step relative to a weight's size.
    weight_decay : float
        Applied to matrices; vectors (norms and biases) aren't decayed.

    Raises
    ------
    UsageError
        For "adamw8bit" if bitsandbytes isn't installed.
    """
    trained = [p for p in model.parameters() if p.requires_grad and not p.is_meta]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    make: dict[Optimizer, Callable[..., torch.optim.Optimizer]] = {
        "adamw": torch.optim.AdamW,
        "adamw8bit": _adamw_8bit,
        "adafactor": torch.optim.Adafactor,
        "sgd": torch.optim.SGD,
    }
    return make[optimizer](groups, lr=lr)


def update(optimizer: torch.optim.Optimizer) -> None:
    """Take an optimizer's step, also on virtual GPUs without data."""
    with virtual.unknown_numbers_as(1.0):  # Adafactor reads the sizes of weights and updates
        optimizer.step()


def _adamw_8bit(groups: list[dict[str, Any]], **arguments: Any) -> torch.optim.Optimizer:
    """Make bitsandbytes' 8-bit AdamW, imported only here; raise UsageError if not installed."""
    require_package("bitsandbytes", "the optimizer adamw8bit needs")
    with quiet_libraries():
        package: Any = import_module("bitsandbytes.optim")
    optimizer: torch.optim.Optimizer = package.AdamW8bit(groups, **arguments)
    return optimizer

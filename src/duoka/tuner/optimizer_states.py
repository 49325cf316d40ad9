"""Optimizer states as named tensors, to save and restore the states of any optimizer.

A state is called by its parameter's name, a slash, and its key in the optimizer. Numbers are saved
as tensors with one element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_TABLES = ("qmap1", "qmap2")
"""Quantization tables of bitsandbytes' 8-bit states: constant, so they are not saved."""


# AdamW's states of lm_head.weight are lm_head.weight/step, …/exp_avg and …/exp_avg_sq. A state that
# is a Python number gets a new tensor here; `set_numbers` brings its value back after loading.
def optimizer_tensors(
    parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None
) -> dict[str, Tensor]:
    """Return all states of the parameters by name.

    Writing to the tensors changes the states, except for states that are Python numbers.
    """
    return {
        name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for name, states, key in _states(parameters, optimizer)
        for value in [states[key]]
    }


def set_numbers(
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer | None,
    tensors: Mapping[str, Tensor],
) -> None:
    """Set states of Python numbers to the values of tensors, by name."""
    for name, states, key in _states(parameters, optimizer):
        if isinstance(states[key], int | float):
            states[key] = type(states[key])(tensors[name].item())


def make_states(optimizer: Optimizer | None) -> None:
    """Make a new optimizer create its states, without changing a parameter.

    Optimizers create states in their first step. With zero gradients and a learning rate of zero no
    parameter changes; the states are then overwritten.
    """
    if optimizer is None:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def drop_states(
    parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None, names: Iterable[str]
) -> None:
    """Remove the states of parameters without a state among the saved `names`.

    These parameters had no optimizer step yet: all steps were skipped, or had no gradient for them.
    """
    stepped = {name.partition("/")[0] for name in names if "/" in name}
    for name, parameter in parameters.items():
        if optimizer is not None and name not in stepped:
            optimizer.state.pop(parameter, None)


def _states(
    parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each state: its name, the dict of its parameter's states, and its key there."""
    for name, parameter in parameters.items():
        states = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in states.items():
            if value is not None and key not in _TABLES:
                yield f"{name}/{key}", states, key

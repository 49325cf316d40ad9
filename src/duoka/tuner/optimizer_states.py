"""Optimizer states as named tensors, for any optimizer, to save and restore.

A state is named by its parameter, a slash, and its key in the optimizer. Tensors that consist of
others, such as 8-bit states, are saved as their parts, and numbers as tensors with one element.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from duoka.virtual.tensor import VirtualTensor

_TABLES = ("qmap1", "qmap2")
"""What 8-bit numbers of bitsandbytes stand for: made anew, and the same for all parameters."""


def optimizer_tensors(
    parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None
) -> dict[str, Tensor]:
    """Return all states of the parameters by name; writing to the tensors changes the states."""
    return {
        name: tensor
        for state_name, states, key in _states(parameters, optimizer)
        for name, tensor in _parts(state_name, states[key])
    }


def set_numbers(
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer | None,
    tensors: Mapping[str, Tensor],
) -> None:
    """Set the states that are Python numbers from tensors."""
    for name, states, key in _states(parameters, optimizer):
        if isinstance(states[key], int | float):
            states[key] = type(states[key])(tensors[name].item())


def make_states(optimizer: Optimizer | None) -> None:
    """Let a new optimizer create its states without changing a parameter.

    Optimizers create states in their first step. With zero gradients and a learning rate of zero no
    parameter changes; the states are then overwritten.
    """
    if optimizer is None:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        # Those that compile their step insist on a tensor.
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def drop_states(
    parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None, names: Iterable[str]
) -> None:
    """Keep states only for parameters with some among `names`.

    The other parameters had no optimizer step yet: all were skipped, or they had no gradient.
    """
    stepped = {name.partition("/")[0] for name in names if "/" in name}
    for name, parameter in parameters.items():
        if optimizer is not None and name not in stepped:
            optimizer.state.pop(parameter, None)


def _states(
    parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield name, dict and key of each state."""
    for name, parameter in parameters.items():
        states = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in states.items():
            if value is not None and key not in _TABLES:
                yield f"{name}/{key}", states, key


def _parts(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the plain tensors of a state by name."""
    if not isinstance(value, Tensor):
        assert isinstance(value, int | float), f"{name} is {type(value)}"
        yield name, torch.tensor(value, dtype=torch.float64)
    elif is_traceable_wrapper_subclass(value) and not isinstance(value, VirtualTensor):
        for part in value.__tensor_flatten__()[0]:
            yield from _parts(f"{name}.{part}", getattr(value, part))
    else:
        yield name, value

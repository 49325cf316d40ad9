"""An optimizer's states as tensors by name, for any optimizer: to be saved, and filled again.

The name of a state is that of its parameter, a slash and what the optimizer calls it. A tensor that
consists of others, as states in 8 bit do, is given as these; a number as a tensor of one element.
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
    """All that an optimizer has of these parameters; in the tensors it can be changed."""
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
    """Take those states that are Python's numbers from tensors."""
    for name, states, key in _states(parameters, optimizer):
        if isinstance(states[key], int | float):
            states[key] = type(states[key])(tensors[name].item())


def make_states(optimizer: Optimizer | None) -> None:
    """Let a new optimizer make its states, by a step that changes no parameter.

    Optimizers make them in their first step. With a gradient of zero and a learning rate of zero
    none of them changes a parameter; what the states become is to be overwritten.
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
    """Leave states to those parameters that have some among `names`.

    The others' first step is still to come: all so far were skipped, or they had no gradient.
    """
    stepped = {name.partition("/")[0] for name in names if "/" in name}
    for name, parameter in parameters.items():
        if optimizer is not None and name not in stepped:
            optimizer.state.pop(parameter, None)


def _states(
    parameters: Mapping[str, nn.Parameter], optimizer: Optimizer | None
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each state's name, the dict that holds it, and the key to it there."""
    for name, parameter in parameters.items():
        states = {} if optimizer is None else optimizer.state.get(parameter, {})
        for key, value in states.items():
            if value is not None and key not in _TABLES:
                yield f"{name}/{key}", states, key


def _parts(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of a state, by name."""
    if not isinstance(value, Tensor):
        assert isinstance(value, int | float), f"{name} is {type(value)}"
        yield name, torch.tensor(value, dtype=torch.float64)
    elif is_traceable_wrapper_subclass(value) and not isinstance(value, VirtualTensor):
        for part in value.__tensor_flatten__()[0]:
            yield from _parts(f"{name}.{part}", getattr(value, part))
    else:
        yield name, value

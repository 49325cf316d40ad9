"""Memory of optimizers: states of each trained parameter, and temporaries of an update.

Modelled are torch's AdamW, SGD and Adafactor, and bitsandbytes' 8-bit AdamW, as they run on a GPU.
Matrices are updated first, with weight decay; vectors are updated after them, without weight decay.
This module knows nothing of devices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .workload import Optimizer

MOST_TEMPORARIES = {"adamw": math.inf, "adamw8bit": 0, "adafactor": 2, "sgd": 0}
"""The most parameter-sized temporaries live at a time during an update of a group."""
_LEAST_8BIT_ELEMENTS = 4096  # bitsandbytes keeps the states of smaller tensors in float32
_8BIT_BLOCK = 256
_TABLE_BYTES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTensor:
    """A trained parameter, whose gradient has the same dtype."""

    shape: tuple[int, ...]
    item_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameter; the gradient has as many."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def decays(self) -> bool:
        """True for a matrix; False for norms and biases, updated without weight decay."""
        return len(self.shape) > 1


def state_bytes(optimizer: Optimizer, tensor: TrainedTensor) -> tuple[int, ...]:
    """Return the bytes of each optimizer state of a parameter, in allocation order."""
    num_elements = math.prod(tensor.shape)
    if optimizer == "sgd":
        return ()
    if optimizer == "adamw":
        return (tensor.num_bytes,) * 2
    if optimizer == "adafactor":
        if not tensor.decays:
            return (tensor.num_bytes,)
        rows, columns = num_elements // tensor.shape[-1], num_elements // tensor.shape[-2]
        return rows * tensor.item_bytes, columns * tensor.item_bytes
    if num_elements < _LEAST_8BIT_ELEMENTS:
        return (4 * num_elements,) * 2
    scale_bytes = 4 * math.ceil(num_elements / _8BIT_BLOCK)
    return num_elements, num_elements, scale_bytes, scale_bytes


def shared_bytes(optimizer: Optimizer, tensors: Iterable[TrainedTensor]) -> tuple[int, ...]:
    """Return the bytes of tables shared by all states: the values of 8-bit codes.

    Empty for other optimizers, and if all tensors are too small for 8-bit states.
    """
    is_needed = optimizer == "adamw8bit" and any(
        math.prod(tensor.shape) >= _LEAST_8BIT_ELEMENTS for tensor in tensors
    )
    return (_TABLE_BYTES,) * 2 if is_needed else ()


def update_groups(tensors: Iterable[TrainedTensor]) -> list[list[TrainedTensor]]:
    """Return the parameters in groups that are updated together: matrices, then vectors."""
    trained = list(tensors)
    return [[tensor for tensor in trained if tensor.decays == decays] for decays in (True, False)]

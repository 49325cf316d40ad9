"""A small twin of a model: the same classes and modules with narrow layers, to compute with.

A repair changes code, not sizes. What is shown on a twin that has every module of the model, and so
the same placement, is shown of the code that both run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .checking import REAL_BYTES, num_bytes
from .subject import Subject

_NARROWED = ("hidden_size", "intermediate_size", "head_dim", "kv_channels")
# The narrowest first; not every number of heads or rotary width can be divided by it.
_FACTORS = (32, 16, 8, 4)
_SEED = 20


def small_twin(subject: Subject) -> tuple[Subject, str] | None:
    """A subject that can be computed, and in words what it is; None where that can't be made.

    Only models of transformers have a configuration to make it from, and their inputs are made
    for any width; inputs that were given might not fit.
    """
    model = subject.model
    if not isinstance(model, PreTrainedModel) or subject.inputs is not None:
        return None
    for factor in _FACTORS:
        twin = _built(model, factor)
        if twin is not None and num_bytes(twin) <= REAL_BYTES:
            words = f"on the same modules, {factor} times narrower, in float32"
            return replace(subject, model=twin), words
    return None


def _built(model: PreTrainedModel, factor: int) -> PreTrainedModel | None:
    """The model with narrower layers; None where its code refuses that, or has other modules."""
    config = copy.deepcopy(model.config)
    _narrow(config, factor)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            # In float32, in which the CPU computes fastest.
            twin: Any = type(model)(config).float()
    except Exception:
        # Any code of the model's, on sizes that its author may not have thought of.
        return None
    twin.train(model.training)
    return twin if _names(twin) == _names(model) else None


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers())]


def _narrow(config: Any, factor: int) -> None:
    for part in (config, *_parts(config)):
        for name, value in list(vars(part).items()):
            is_width = name.endswith(_NARROWED) and type(value) is int
            if is_width and value % factor == 0:
                setattr(part, name, value // factor)


def _parts(config: Any) -> Iterator[Any]:
    """The configurations inside a configuration: of the text, of the images."""
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield part
            yield from _parts(part)

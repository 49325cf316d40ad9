"""Small twins of models that are too big to compute: the same code, fewer layers, fewer words.

A twin has the widths of attention of its model, and the first of each run of layers that are placed
alike. It stands for its model only where it shows the same faults at the same lines.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from duoka.errors import Faults

from .. import Subject, complete, device_of

_MOST = {
    "vocab_size": 512,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
_TOKENS = 8
_MOST_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Twin:
    """A small twin on a placement like its model's.

    Parameters
    ----------
    subject : Subject
    num_layers : int
        So many layers it has.
    """

    subject: Subject
    num_layers: int


def twin_of(subject: Subject) -> Twin | None:
    """A twin that can be computed; None where none can be made.

    Only of models of transformers that run a workload: for inputs that were given, the words and
    widths must be the model's own.
    """
    model = subject.model
    given = subject.inputs is not None or subject.prompt
    if given or not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        return None
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    num_layers = getattr(text, "num_hidden_layers", 0)
    stacks = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not stacks:
        return None
    kept = _kept_layers(subject, stacks, num_layers)
    try:
        _shrink(text, kept, num_layers)
        small = type(model)(config).train(model.training)
    except Exception:  # whatever a family's own code says of sizes that depend on each other
        return None
    entries = tuple(
        (name, device)
        for entry, device in subject.entries
        if (name := _renamed(entry, stacks, kept)) is not None
    )
    twin = replace(
        subject,
        model=small,
        entries=entries,
        budgets={},
        completeness=Faults(),
        workload=replace(subject.workload, prompt_tokens=_TOKENS, new_tokens=_TOKENS),
    )
    num_bytes = sum(each.numel() * each.element_size() for each in small.parameters())
    if complete(small, entries)[1] or num_bytes > _MOST_BYTES:
        return None
    return Twin(twin, len(kept))


def _kept_layers(subject: Subject, stacks: Sequence[str], num_layers: int) -> list[int]:
    """The first of each run of layers that are placed alike, and the last of all."""
    entries = dict(subject.entries)
    placed = [
        tuple(
            (stack, name, device_of(f"{stack}.{layer}.{name}".rstrip("."), entries))
            for stack in stacks
            for name, _ in subject.model.get_submodule(f"{stack}.{layer}").named_modules()
        )
        for layer in range(num_layers)
    ]
    return [
        layer
        for layer in range(num_layers)
        if layer in (0, num_layers - 1) or placed[layer] != placed[layer - 1]
    ]


def _shrink(text: Any, kept: Sequence[int], num_layers: int) -> None:
    """Make a configuration smaller: fewer layers, words, and neurons between them."""
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == num_layers:
            setattr(text, name, [value[layer] for layer in kept])
        elif name in _MOST and isinstance(value, int):
            setattr(text, name, min(value, _MOST[name]))
        elif name.endswith("_token_id") and value is not None:
            setattr(text, name, None if name == "pad_token_id" else 1)
    text.num_hidden_layers = len(kept)


def _renamed(entry: str, stacks: Sequence[str], kept: Sequence[int]) -> str | None:
    """An entry as the twin calls it; None for one of a layer that it doesn't have."""
    for stack in stacks:
        found = re.match(rf"{re.escape(stack)}\.(\d+)(?=\.|$)", entry)
        if found is not None:
            layer = int(found[1])
            if layer not in kept:
                return None
            return f"{stack}.{kept.index(layer)}{entry[found.end() :]}"
    return entry

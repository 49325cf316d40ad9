"""Prove a fix: compare patched code on several devices with the original code on one device.

A model that is too large to compute is replaced by a smaller twin of the same code (fewer layers,
smaller vocabulary), if the twin shows the same faults at the same lines.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from duoka.base.text import value_of
from duoka.base.units import format_bytes, format_count
from duoka.errors import Faults
from duoka.models.meta import construct
from duoka.report.check_report import CheckReport
from duoka.runtime.dispatch.place_tensors import parameter_bytes
from duoka.virtual import REAL_BYTES

from ..compute import Numbers, compute
from ..run import check_subject
from ..subject import Subject, complete_map

Patched = Callable[[nn.Module], AbstractContextManager[None]]
"""Returns a context in which a model runs the patched code."""

# A twin keeps its model's attention widths. These sizes only cost memory, and are limited.
_MAX_SIZES = {
    "vocab_size": 512,
    "padded_vocab_size": 512,
    "intermediate_size": 256,
    "ffn_hidden_size": 256,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
_DEPTHS = ("num_layers", "n_layer", "n_layers")
_TOKENS = 8
_MOST_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of a proof; `reason` explains a failure, or names the twin ("" if none is used)."""

    holds: bool
    reason: str = ""


def prove(report: CheckReport, subject: Subject, patched: Patched) -> Proof:
    """Compare patched code on several devices with the original on one, on a twin if necessary."""
    weight_bytes = parameter_bytes(subject.model)
    if weight_bytes <= REAL_BYTES:
        difference = why_not_equal(subject, patched)
        return Proof(not difference, difference)
    twin = twin_of(subject)
    if twin is None:
        return Proof(
            False,
            f"the repeated check found no fault, but {format_bytes(weight_bytes)} of weights are "
            "too large to compare results with real numbers on this machine",
        )
    small, num_layers = twin
    place = f"on a smaller model with {format_count(num_layers, 'layer')} and the same code"
    missing = _places(report) - _places(check_subject(small))
    if missing:
        return Proof(False, f"{place} there is no fault at line {min(missing)[1]}")
    difference = why_not_equal(small, patched)
    return Proof(not difference, f"{place}: {difference}" if difference else place)


def _places(report: CheckReport) -> set[tuple[str, int, str]]:
    """Return the file, line and operation of each fault."""
    return {(fault.file, fault.line, fault.op) for fault in report.faults}


# The reference is the original code on one device. There it runs as written; on several devices it
# runs only because the check moves tensors, so its results reflect the check's own choices.
def why_not_equal(subject: Subject, patched: Patched) -> str:
    """Describe how patched code differs from the original; "" if it does not."""
    original = compute(subject, on_one=True)
    if (stop := original.report.stop) is not None:
        return f"the original code fails on one device with real numbers: {stop.message}"
    with patched(subject.model):
        repaired = compute(subject)
    if (stop := repaired.report.stop) is not None:
        return f"the patched code fails with real numbers: {stop.message}"
    if repaired.report.faults:
        return "the patched code still mixes devices when it runs with real numbers"
    return _difference(original, repaired)


def _difference(original: Numbers, repaired: Numbers) -> str:
    """Describe the first difference between two runs."""
    if not original.tensors:
        return "the model returns no tensor to compare"
    missing = original.tensors.keys() ^ repaired.tensors.keys()
    if missing:
        return f"only one of the original and the patched code returns {min(missing)}"
    for name, tensor in original.tensors.items():
        if tensor.is_floating_point() and tensor.numel() and bool(tensor.isnan().all()):
            return f"{name} is NaN in the original code: there is nothing to compare"
        try:  # equal up to rounding; bit for bit if the kernels are the same
            torch.testing.assert_close(repaired.tensors[name], tensor, equal_nan=True)
        except AssertionError as error:
            return f"{name} differs from the original: {str(error).splitlines()[0]}"
    return ""


# ── twins ──


def twin_of(subject: Subject) -> tuple[Subject, int] | None:
    """Return a computable twin on a similar placement, and its number of layers.

    None if the subject has inputs of its own, which fit the original vocabulary and widths only; if
    the model isn't a transformers model with one stack of layers, or is an encoder-decoder; or if
    a smaller model can't be built, can't be placed, or is still too large.
    """
    model = subject.model
    has_inputs = subject.inputs is not None or subject.prompt
    if has_inputs or not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
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
    layers = _distinct_layers(subject, stacks, num_layers)
    try:
        _shrink(text, layers, num_layers)
        small = construct(lambda: type(model)(config)).train(model.training)
    except Exception:  # any error of the model's code about sizes that depend on each other
        return None
    entries = tuple(
        (name, device)
        for entry, device in subject.entries
        if (name := _rename_entry(entry, stacks, layers)) is not None
    )
    if complete_map(small, entries)[1] or parameter_bytes(small) > _MOST_BYTES:
        return None
    workload = replace(subject.workload, prompt_tokens=_TOKENS, new_tokens=_TOKENS)
    twin = replace(subject, model=small, entries=entries, workload=workload)
    return replace(twin, budgets={}, completeness=Faults()), len(layers)


def _distinct_layers(subject: Subject, stacks: Sequence[str], num_layers: int) -> list[int]:
    """Return the first index of each run of identically placed layers, and the last index."""
    # Of six layers on devices 0 0 0 0 1 1, where layer 2 has a part on device 1, these are 0, 2, 3,
    # 4 and 5: each boundary between different placements is kept, and both ends of the stack.
    entries = dict(subject.entries)
    placements = [
        tuple(
            (stack, name, value_of(f"{stack}.{layer}.{name}".rstrip("."), entries))
            for stack in stacks
            for name, _ in subject.model.get_submodule(f"{stack}.{layer}").named_modules()
        )
        for layer in range(num_layers)
    ]
    return [
        layer
        for layer in range(num_layers)
        if layer in (0, num_layers - 1) or placements[layer] != placements[layer - 1]
    ]


# A config of six layers, of which the layers 0, 2, 3, 4 and 5 are kept:
#
#   setting             before                 after             because
#   num_hidden_layers   6                      5
#   layer_types         [f, s, f, s, f, s]     [f, f, s, f, s]   a list by layer keeps those layers
#   vocab_size          151552                 512               it costs memory only (`_MAX_SIZES`)
#   intermediate_size   13696                  256               it costs memory only
#   eos_token_id        151329                 1                 it must lie in the vocabulary
#   pad_token_id        151329                 None              prompts consist of the token 1
#   hidden_size, heads  as they are                              model code may depend on them
#
# In the map "model.layers.3" becomes "model.layers.2", and "model.layers.1" goes (`_rename_entry`).
def _shrink(text: Any, layers: Sequence[int], num_layers: int) -> None:
    """Reduce the layers, vocabulary and MLP sizes of a text config in place."""
    for name, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == num_layers:
            setattr(text, name, [value[layer] for layer in layers])
        elif name in _MAX_SIZES and isinstance(value, int):
            setattr(text, name, min(value, _MAX_SIZES[name]))
        elif name in _DEPTHS and value == num_layers:
            setattr(text, name, len(layers))
        elif name.endswith("_token_id") and value is not None:
            setattr(text, name, None if name == "pad_token_id" else 1)
    text.num_hidden_layers = len(layers)


def _rename_entry(entry: str, stacks: Sequence[str], layers: Sequence[int]) -> str | None:
    """Return the name of an entry in the twin; None for an omitted layer."""
    for stack in stacks:
        match = re.match(rf"{re.escape(stack)}\.(\d+)(?=\.|$)", entry)
        if match is not None:
            layer = int(match[1])
            if layer not in layers:
                return None
            return f"{stack}.{layers.index(layer)}{entry[match.end() :]}"
    return entry

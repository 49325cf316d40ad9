"""The profile of a model: read from the cache, or traced and then cached."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from duoka import virtual
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.forecast import profile_cache
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Workload
from duoka.models.from_checkpoint import notes_of
from duoka.planner.planner import with_chunks
from duoka.planner.resolve import joined_note, workload_for
from duoka.runtime import load as loader
from duoka.runtime.call.generate import refuse_without_generation
from duoka.runtime.dispatch.dispatch import without_data
from duoka.runtime.dispatch.place_tensors import parameter_bytes
from duoka.runtime.load.adapter import build_to_serve
from duoka.tracing import (
    Irregular,
    TraceSpec,
    profile_training,
    trace,
    trace_call,
    trace_serving,
    trace_workload,
)


def profile_checkpoint(checkpoint: Checkpoint, workload: Workload) -> Profile:
    """Return the profile of a checkpoint: from the cache, or traced and then cached."""
    workload = workload_for(checkpoint, workload)
    profile = profile_cache.find_profile(checkpoint.fingerprint, workload)
    if profile is None:
        model = build_to_serve(checkpoint, workload)
        if checkpoint.format == "safetensors":
            # A checkpoint whose tensors don't match the model could never be loaded.
            loader.refuse_differences(model, checkpoint)
        notes = notes_of(model, checkpoint, workload)
        spec = TraceSpec(
            fingerprint=checkpoint.fingerprint,
            max_context_tokens=checkpoint.max_context_tokens,
            published=None if checkpoint.tensors is None else tuple(checkpoint.tensors),
            conditions=workload.conditions,
        )
        build = partial(build_to_serve, checkpoint, workload)
        profile, regular = _trace(build, spec, workload, batched=True)
        # The profile has the dtype of the first parameter, which may be one kept in another dtype.
        if (layers := profile.outline.joined_layers) is not None:
            notes = (*notes, f"{joined_note(layers)}.")
        profile = replace(profile, dtype=workload.dtype, notes=(*notes, *profile.notes))
        profile_cache.keep_profile(profile, workload, alone=not regular)
    return profile


def profile_module(
    model: nn.Module, workload: Workload, inputs: Mapping[str, Any] | tuple[Any, ...] | None
) -> Profile:
    """Return the profile of a model object, without changing the object.

    With `inputs` the profile covers one call on these example inputs; otherwise generation or
    training, as the workload says.
    """
    spec = TraceSpec(fingerprint=fingerprint_module(model), conditions=workload.conditions)
    if inputs is not None:
        return virtual.with_values(
            lambda data: trace_call(without_data(model), replace(spec, data=data), inputs),
            partial(parameter_bytes, model),
        )
    refuse_without_generation(model)
    # Not cached for other workloads, so steps of several sequences, the most, run if needed.
    batched = workload.batch > 1
    return _trace(lambda: without_data(model), spec, workload, batched=batched)[0]


def _trace(
    build: Callable[[], nn.Module], spec: TraceSpec, workload: Workload, *, batched: bool
) -> tuple[Profile, bool]:
    """Return a profile for all workloads and True, or for this workload alone and False.

    A trace that fails for want of tensor values is repeated with values (`virtual.with_values`).
    """
    return virtual.with_values(
        lambda data: _trace_with(build, replace(spec, data=data), workload, batched=batched),
        lambda: parameter_bytes(build()),
    )


def _trace_with(
    build: Callable[[], nn.Module], spec: TraceSpec, workload: Workload, *, batched: bool
) -> tuple[Profile, bool]:
    """Trace as `_trace`, with the data given in `spec`."""
    if workload.training is not None:
        return virtual.apart(profile_training, build, spec, workload, batched=batched)
    if workload.is_paged:
        return trace_serving(build(), spec), True
    with suppress(Irregular):
        profile = trace(build(), spec, batched=batched)
        if profile.answers(workload.batch):
            return profile, True
    return trace_workload(build(), spec, list(with_chunks(workload))), False


def fingerprint_module(model: nn.Module) -> str:
    """Return a hash of a model's class, configuration, and tensor names, shapes and dtypes."""
    digest = hashlib.sha256(type(model).__qualname__.encode())
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_json_string"):
        digest.update(config.to_json_string(use_diff=False).encode())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return digest.hexdigest()

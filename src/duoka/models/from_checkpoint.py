"""Build the model of a checkpoint, without data but with quantized weights in place."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from duoka import models
from duoka.base.units import format_bytes
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.config import is_for_transformers4
from duoka.checkpoint.quantized import method_of, settings_of, without_quantization
from duoka.checkpoint.tokenizer_files import own_class
from duoka.errors import ModelError
from duoka.forecast.workload import Workload

from . import quantization
from .text.prompts import ChatFormat, chat_format
from .text.tokenizer import load_tokenizer

IMAGES_CONFIG = "_duoka_images_config"
"""The attribute of a model in which `build_model` stores its checkpoint's `images_config`."""


def build_model(checkpoint: Checkpoint, workload: Workload) -> PreTrainedModel:
    """Build the model of a checkpoint on the meta device, in the workload's dtype.

    Weights are quantized as the workload demands, or as the checkpoint was published.
    """
    method, tensors = method_of(checkpoint.config), checkpoint.tensors
    config = checkpoint.config if method is None else without_quantization(checkpoint.config)
    code = _code_of(checkpoint) if checkpoint.builds_own_model else None
    model = models.build(config, dtype=getattr(torch, workload.dtype), code=code)
    # Needed to make up images; transformers' models don't know their image processors.
    vars(model)[IMAGES_CONFIG] = checkpoint.images_config
    if method is None:
        assert workload.quantize != "auto", "resolve it first"
        if workload.quantize != "none":
            trains = workload.training is not None
            quantization.quantize_model(model, workload.quantize, trains=trains)
    elif tensors is None or any(tensor.nbytes is None for tensor in tensors.values()):
        raise ModelError(
            f"the checkpoint is quantized ({method}), and the sizes of its tensors are unknown",
            hint="give a directory or a Hub repository that contains the safetensors files",
        )
    else:
        models.hold_as_stored(model, settings_of(checkpoint.config) or {}, tensors)
    if workload.host_experts:
        cache_bytes = workload.conditions.expert_cache_bytes
        quantization.keep_on_host(model, workload.host_experts, cache_bytes)
    return model


def tokenizer_of(
    checkpoint: Checkpoint, native: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint whose files are on this machine; see `load_tokenizer`."""
    reference = own_class(checkpoint)
    tokenizer_class = reference and _code_of(checkpoint).import_class(reference)
    return load_tokenizer(
        checkpoint.path, checkpoint.config, native=native, tokenizer_class=tokenizer_class
    )


def chat_format_of(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
    """Return the chat format of a checkpoint's model, with its image processor if it takes images.

    A checkpoint with model code of its own processes images in its own way.
    """
    directory = None if checkpoint.builds_own_model else checkpoint.path
    return chat_format(tokenizer, checkpoint.config, checkpoint.generation_config, directory)


def _code_of(checkpoint: Checkpoint) -> models.RemoteCode:
    """Return the remote code of a trusted checkpoint."""
    return models.RemoteCode(
        checkpoint.path,
        {file.name: file.content for file in checkpoint.code},
        legacy=is_for_transformers4(checkpoint.config),
    )


def notes_of(model: PreTrainedModel, checkpoint: Checkpoint, workload: Workload) -> tuple[str, ...]:
    """Return notes for the user about a model's quantized weights; empty if there are none."""
    method = method_of(checkpoint.config)
    if method is None:
        assert workload.quantize != "auto", "resolve it first"
        return () if workload.quantize == "none" else quantization.notes(model, workload.quantize)
    weights = [weight for weight in model.parameters() if quantization.is_composed(weight)]
    return (
        f"The checkpoint is quantized ({method}): {len(weights)} weights are loaded with their "
        f"numbers, in {format_bytes(sum(map(quantization.num_bytes, weights)))} including scales.",
    )

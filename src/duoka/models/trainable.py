"""Preparing a model for training: trainable parameters, their types, and checkpointing.

Adapters are peft's own, put into the model in place: its modules keep their names, and the added
parameters lie inside the adapted layer. So a placement of the model places the adapters, each with
its layer.
"""

from __future__ import annotations

import difflib
import re
import warnings
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from duoka.base.quiet import quiet_libraries
from duoka.errors import ModelError, UsageError
from duoka.forecast.workload import Training

from .chunked_loss import chunk_loss
from .quantization import freeze_quantized

_ADAPTED = ".base_layer"
"""The name of the adapted layer below the name that the layer had."""
_ADAPTABLE = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, Conv1D)
_ALL_LINEAR = "all-linear"
WITHOUT_CHECKPOINTING = "train it without gradient checkpointing (--checkpointing)"


def make_trainable(
    model: nn.Module,
    training: Training,
    dtype: torch.dtype,
    frozen: Sequence[str] = (),
    *,
    has_adapters: bool = True,
) -> None:
    """Change a model in place so that a step of training can be run.

    The modules and parameters called `frozen` aren't trained, and keep their type. Without adapters
    a model for LoRA is only frozen; the caller puts adapters into it.
    """
    freeze_quantized(model)
    if training.method == "lora" and has_adapters:
        _adapt(model, training, torch.float32 if training.master_weights else dtype, frozen)
    elif training.method == "lora":
        model.requires_grad_(False)
    else:
        parameters = model.named_parameters()
        frozen_dtypes = [(p, p.dtype) for name, p in parameters if _is_in(name, frozen)]
        if training.master_weights:
            model.to(torch.float32)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        for parameter, own_dtype in frozen_dtypes:
            parameter.data = parameter.data.to(own_dtype)
            parameter.requires_grad_(False)
    if training.gradient_checkpointing:
        _checkpoint(model)
    chunk_loss(model)
    model.train()


def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Give the adapters of layers that have data their first values, each beside its layer.

    They are peft's own, drawn by the seed and the layer's name: the same in any number of processes
    that share the model.
    """
    from peft.tuners.lora import LoraLayer

    for name, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        device = next(iter(layer.get_base_layer().parameters())).device
        if device.type == "meta":
            continue
        parts = [getattr(layer, part) for part in layer.adapter_layer_names]
        for part in parts:
            part.to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed ^ zlib.crc32(name.encode()))
            for adapter in layer.r:
                cast(Any, layer).reset_lora_parameters(adapter, init_lora_weights=True)
        for part in parts:
            part.to(device)


def base_name(name: str) -> str:
    """Return the name that a module or tensor had before adapters were put into its model."""
    return name.replace(_ADAPTED, "")


def inject(model: nn.Module, **settings: Any) -> None:
    """Put peft's adapters into a model in place, without data; settings are `LoraConfig`'s."""
    try:
        with quiet_libraries():  # peft imports bitsandbytes
            import peft
    except ImportError as error:
        message = "adapters need peft, which isn't installed"
        raise UsageError(message, hint='pip install "duoka[train]"') from error
    try:
        with warnings.catch_warnings():
            # peft warns of layers with transposed weights, and handles them.
            warnings.filterwarnings("ignore", ".*fan_in_fan_out.*")
            # torchao's weights can't be merged with adapters: duoka merges with the checkpoint's.
            warnings.filterwarnings("ignore", ".*get_apply_tensor_subclass.*")
            # peft looks for the patterns of experts, which it has made itself, among layers only.
            warnings.filterwarnings("ignore", ".*_pattern keys did not match.*")
            config = peft.LoraConfig(**settings)
            peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise UsageError(f"peft can't adapt {type(model).__name__}: {error}") from error


def _is_in(name: str, frozen: Sequence[str]) -> bool:
    return any(name == owner or name.startswith(f"{owner}.") for owner in frozen)


def _adapt(model: nn.Module, training: Training, dtype: torch.dtype, frozen: Sequence[str]) -> None:
    originals = {id(parameter) for parameter in model.parameters()}
    inject(
        model,
        r=training.lora_rank,
        lora_alpha=2 * training.lora_rank if training.lora_alpha is None else training.lora_alpha,
        lora_dropout=training.lora_dropout,
        target_modules=known_targets(model, training.lora_targets, frozen) or _ALL_LINEAR,
        exclude_modules=rf"({'|'.join(map(re.escape, frozen))})(\..*)?" if frozen else None,
    )
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in originals and parameter.dtype != dtype:
                learns = parameter.requires_grad
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype), learns))


def known_targets(
    model: nn.Module, targets: Sequence[str], frozen: Sequence[str] = ()
) -> list[str]:
    """Check targets: ends of names of adaptable modules; return a list."""
    layers = {name for name, module in model.named_modules() if isinstance(module, _ADAPTABLE)}
    trained = {name for name in layers if not _is_in(name, frozen)}
    ends = sorted({name.rpartition(".")[2] for name in trained})
    for target in targets:
        if not _has(layers, target):
            near = difflib.get_close_matches(target.rpartition(".")[2], ends, n=1)
            raise UsageError(
                f"no module that supports adapters is called {target[:60]!r}"
                + (f"; did you mean {near[0]!r}?" if near else ""),
                hint=f"LoRA targets are name suffixes: {', '.join(ends)}",
            )
    if targets and not any(_has(trained, target) for target in targets):
        raise UsageError(
            f"text input reaches no module called {' or '.join(targets)}: {', '.join(frozen[:4])} "
            "remains frozen",
            hint=f"LoRA targets are name suffixes: {', '.join(ends)}",
        )
    return list(targets)


def _has(names: Iterable[str], target: str) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


def _checkpoint(model: Any) -> None:
    if not getattr(model, "supports_gradient_checkpointing", False):
        message = f"{type(model).__name__} has no gradient checkpointing"
        raise ModelError(message, hint=WITHOUT_CHECKPOINTING)
    # A model's own switch may do nothing, as in GLM-4's published code: then the base class's.
    base: Any = PreTrainedModel.gradient_checkpointing_enable  # without types there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if type(model).gradient_checkpointing_enable is not base:
            model.gradient_checkpointing_enable()
            switches = [part for part in model.modules() if hasattr(part, "gradient_checkpointing")]
            if not switches or any(part.gradient_checkpointing for part in switches):
                return
        base(model)

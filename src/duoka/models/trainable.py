"""Prepare a model for training: trainable parameters, their dtypes, and gradient checkpointing.

Adapters are peft's own, injected in place: the model's modules keep their names, and adapters are
submodules of the adapted layers. So a placement of the model places each adapter with its layer.
"""

from __future__ import annotations

import difflib
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from duoka.base.quiet import quiet_libraries
from duoka.base.text import longest_prefix
from duoka.errors import ModelError, UsageError
from duoka.forecast.workload import Training

from .chunked_loss import chunk_loss
from .quantization import ExpertStack, freeze_quantized

_ADAPTED = ".base_layer"
"""The suffix of an adapted layer's own name: peft wraps the layer in a module of its old name."""
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
    """Change a model in place for training: trainable parameters, dtypes, chunked loss.

    Modules and parameters named in `frozen` aren't trained, and keep their dtype. For LoRA adapters
    are injected; without `has_adapters` the model is only frozen, and the caller injects adapters.
    """
    freeze_quantized(model)
    if training.method == "lora" and has_adapters:
        _adapt(model, training, torch.float32 if training.master_weights else dtype, frozen)
    elif training.method == "lora":
        model.requires_grad_(False)
    else:
        parameters = model.named_parameters()
        frozen_dtypes = [(p, p.dtype) for name, p in parameters if longest_prefix(name, frozen)]
        if training.master_weights:
            model.to(torch.float32)
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        for parameter, own_dtype in frozen_dtypes:
            parameter.data = parameter.data.to(own_dtype)
            parameter.requires_grad_(False)
    if training.gradient_checkpointing:
        _enable_checkpointing(model)
    chunk_loss(model)
    model.train()


def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Allocate and initialize the adapters of all layers with data, on the devices of the layers.

    The values are drawn by peft, seeded by `seed` and the layer's name, so that they don't depend
    on the processes that share the model. Layers on the meta device are skipped.
    """
    for name, layer in adapted_layers(model):
        device = next(iter(layer.get_base_layer().parameters())).device
        if device.type == "meta":
            continue
        parts = [getattr(layer, part) for part in layer.adapter_layer_names]
        for part in parts:
            part.to_empty(device="cpu")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed ^ zlib.crc32(name.encode()))
            for adapter in layer.r:
                layer.reset_lora_parameters(adapter, init_lora_weights=True)
        for part in parts:
            part.to(device)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names and modules of the layers that have an adapter."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def base_name(name: str) -> str:
    """Return the name of a module or tensor before adapters were injected."""
    return name.replace(_ADAPTED, "")


def inject(model: nn.Module, **settings: Any) -> None:
    """Inject peft's adapters into a model in place, without data; `settings` are `LoraConfig`'s."""
    with quiet_libraries():  # peft imports bitsandbytes
        import peft
    try:
        with warnings.catch_warnings():
            # peft warns of layers with transposed weights, but handles them.
            warnings.filterwarnings("ignore", ".*fan_in_fan_out.*")
            # peft can't merge into torchao's weights; duoka merges into the checkpoint's weights.
            warnings.filterwarnings("ignore", ".*get_apply_tensor_subclass.*")
            # peft adds patterns for stacks of experts, and warns because no layer matches them.
            warnings.filterwarnings("ignore", ".*_pattern keys did not match.*")
            config = peft.LoraConfig(**settings)
            peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
    except ValueError as error:
        raise UsageError(f"peft can't adapt {type(model).__name__}: {error}") from error


def _adapt(model: nn.Module, training: Training, dtype: torch.dtype, frozen: Sequence[str]) -> None:
    """Inject trainable LoRA adapters of a dtype; all other parameters are frozen."""
    originals = {id(parameter) for parameter in model.parameters()}
    inject(
        model,
        r=training.lora_rank,
        lora_alpha=2 * training.lora_rank if training.lora_alpha is None else training.lora_alpha,
        use_rslora=training.rslora,
        lora_dropout=training.lora_dropout,
        target_modules=known_targets(model, training.lora_targets, frozen) or _ALL_LINEAR,
        exclude_modules=rf"({'|'.join(map(re.escape, frozen))})(\..*)?" if frozen else None,
    )
    _unwrap_quantized_experts(model)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in originals and parameter.dtype != dtype:
                learns = parameter.requires_grad
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype), learns))


# peft adapts the stacked experts of some families, where it takes ``all-linear`` to mean them too.
def _unwrap_quantized_experts(model: nn.Module) -> None:
    """Remove the adapters of quantized experts, which stay frozen."""
    wrapped = []
    for name, layer in adapted_layers(model):
        experts = layer.get_base_layer()
        adapted = getattr(experts, getattr(layer, "parameter_name", "weight"))
        if isinstance(adapted, ExpertStack):
            wrapped.append((name, experts))
    for name, experts in wrapped:
        model.set_submodule(base_name(name), experts)
    if wrapped and next(adapted_layers(model), None) is None:
        raise UsageError(
            f"quantized experts can't have adapters: {base_name(wrapped[0][0])}",
            hint="choose other LoRA targets, or train without --quantize",
        )


def known_targets(
    model: nn.Module, targets: Sequence[str], frozen: Sequence[str] = ()
) -> list[str]:
    """Return LoRA targets, suffixes of module names, as a list after checking them.

    Raises UsageError if a target matches no adaptable module, or all matches are frozen.
    """
    layers = {name for name, module in model.named_modules() if isinstance(module, _ADAPTABLE)}
    trained = {name for name in layers if not longest_prefix(name, frozen)}
    ends = sorted({name.rpartition(".")[2] for name in trained})
    for target in targets:
        if not _has_suffix(layers, target):
            near = difflib.get_close_matches(target.rpartition(".")[2], ends, n=1)
            raise UsageError(
                f"no module that supports adapters is called {target[:60]!r}"
                + (f"; did you mean {near[0]!r}?" if near else ""),
                hint=f"LoRA targets are name suffixes: {', '.join(ends)}",
            )
    if targets and not any(_has_suffix(trained, target) for target in targets):
        raise UsageError(
            f"text input reaches no module called {' or '.join(targets)}: {', '.join(frozen[:4])} "
            "remains frozen",
            hint=f"LoRA targets are name suffixes: {', '.join(ends)}; with images --train-vision "
            "adapts what images reach",
        )
    return list(targets)


def _has_suffix(names: Iterable[str], target: str) -> bool:
    """Return True if a target is a suffix of any of the names."""
    return any(name == target or name.endswith(f".{target}") for name in names)


def _enable_checkpointing(model: Any) -> None:
    """Enable gradient checkpointing; raise ModelError for a model without support."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        message = f"{type(model).__name__} has no gradient checkpointing"
        raise ModelError(message, hint=WITHOUT_CHECKPOINTING)
    # A model's own method may have no effect, as in GLM-4's published code: then the base class's
    # method is called.
    base: Any = PreTrainedModel.gradient_checkpointing_enable  # not annotated there
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        if type(model).gradient_checkpointing_enable is not base:
            model.gradient_checkpointing_enable()
            switches = [part for part in model.modules() if hasattr(part, "gradient_checkpointing")]
            if not switches or any(part.gradient_checkpointing for part in switches):
                return
        base(model)

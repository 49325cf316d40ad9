"""Loads checkpoints that were published quantized, by transformers and further packages.

This module checks that the packages work on this machine, that all of the model is loaded from the
files and stays quantized, and that a failure leaves no memory allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils import logging

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.quantized import Method, is_needless, method_of, stated, without_quantization
from duoka.errors import LoadError
from duoka.models import resolve
from duoka.models.quantization import is_composed
from duoka.planner.placement import Placement

from ..dispatch.place_tensors import devices_by_name
from .fill import Progress
from .load import list_faults, nothing_left

_ELSEWHERE = "export the plan to vLLM or SGLang"
_MOST_NAMES = 5  # of each kind of difference in an error


def refuse_unloadable(config: Mapping[str, Any], placement: Placement) -> None:
    """Raise LoadError if this machine or plan can't run a quantized checkpoint; read no weights."""
    method = method_of(config)
    if method is None:
        return
    if not method.keeps:
        _refuse_unpacking(method, "on first use")
    device = next((at for _, at in placement.entries if at.startswith("vgpu")), None)
    if device is not None and not method.composes:
        raise LoadError(
            f"a {method.name} checkpoint can't be loaded on {device}: its kernels run on real "
            "devices only",
            hint="use duoka check to run the plan on virtual GPUs without weights",
        )
    for package in ("accelerate", method.package):
        if package is not None and find_spec(package.replace("-", "_")) is None:
            raise LoadError(
                f"running a {method.name} checkpoint needs {package}, which isn't installed",
                hint=f"pip install {package}",
            )
    try:
        # Older checkpoints of bitsandbytes don't name their method.
        quantizer: HfQuantizer = AutoHfQuantizer.from_config(
            {"quant_method": "bitsandbytes", **(stated(config) or {})}, pre_quantized=True
        )
        quantizer.validate_environment(device_map=dict(placement.entries), weights_only=True)
    except Exception as error:  # about settings, the machine, or versions
        raise LoadError(
            f"transformers can't run this {method.name} checkpoint here: {str(error)[:300]}",
            hint=_ELSEWHERE,
        ) from error
    if getattr(quantizer.quantization_config, "dequantize", False):
        _refuse_unpacking(method, "on this machine")


def _refuse_unpacking(method: Method, when: str) -> None:
    """Raise LoadError for a checkpoint that transformers would dequantize."""
    raise LoadError(
        f"transformers unpacks {method.name} weights to 16 bit {when}, which needs more memory "
        "than planned",
        hint=_ELSEWHERE,
    )


def load_published(
    checkpoint: Checkpoint,
    model: nn.Module,
    placement: Placement,
    *,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> PreTrainedModel:
    """Load a checkpoint published quantized, each module onto its device.

    After a failure or an interrupt no memory on the devices stays allocated.
    """
    devices = devices_by_name(model, placement)
    with nothing_left(devices.values()), _report_progress(progress, checkpoint.weight_bytes or 0):
        # In a function of its own, whose locals can be freed if it fails.
        return _load(checkpoint, model, placement, dtype)


def _load(
    checkpoint: Checkpoint, planned: nn.Module, placement: Placement, dtype: torch.dtype
) -> PreTrainedModel:
    """Load by transformers, and compare the loaded model with the planned one."""
    method = method_of(checkpoint.config)
    assert method is not None, "load_weights is for the others"
    _, model_class = resolve(without_quantization(checkpoint.config))
    try:
        loaded: Any = model_class.from_pretrained(
            checkpoint.path,
            dtype=dtype,
            device_map=dict(placement.entries),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `_refuse_differences` refuses them
        )
    except (ImportError, OSError) as error:
        raise LoadError(
            f"transformers can't load this {method.name} checkpoint: {str(error)[:300]}",
            hint=_ELSEWHERE,
        ) from error
    model: PreTrainedModel = loaded[0]
    _remove_hooks(model)
    _refuse_differences(method, loaded[1], model, planned)
    _refuse_elsewhere(model, placement)
    model.eval()
    return model


def _refuse_differences(
    method: Method, report: Mapping[str, Any], loaded: nn.Module, planned: nn.Module
) -> None:
    """Raise LoadError with all differences between the loaded and the planned model."""
    faults = list_faults(
        (sorted(report["missing_keys"]), "tensors of the model weren't loaded"),
        (
            sorted(name for name in report["unexpected_keys"] if not is_needless(name)),
            "tensors don't belong to the model",
        ),
        (sorted(name for name, *_ in report["mismatched_keys"]), "tensors have a different shape"),
        (sorted(_dequantized_names(loaded, planned)), "weights were dequantized"),
        most_names=_MOST_NAMES,
    )
    if faults:
        raise LoadError(
            f"transformers loaded this {method.name} checkpoint differently from the plan: "
            + faults,
            hint="download the checkpoint again, or " + _ELSEWHERE,
        )


def _dequantized_names(loaded: nn.Module, planned: nn.Module) -> Iterator[str]:
    """Yield the names of planned quantized weights that were loaded unquantized."""
    parameters = dict(loaded.named_parameters())
    for name, parameter in planned.named_parameters():
        if is_composed(parameter) and name in parameters:
            tensor = parameters[name]
            if not is_composed(tensor) and tensor.nbytes >= parameter.numel() * parameter.itemsize:
                yield name


def _refuse_elsewhere(loaded: nn.Module, placement: Placement) -> None:
    """Raise LoadError if a tensor isn't on its planned device."""
    away = [
        f"{name} on {tensor.device}"
        for name, tensor in (*loaded.named_parameters(), *loaded.named_buffers())
        if str(tensor.device) != placement.device_of(name)
    ]
    if away:
        raise LoadError(
            f"transformers put {len(away)} tensors on other devices than planned: "
            + ", ".join(away[:_MOST_NAMES]),
            hint=_ELSEWHERE,
        )


@contextmanager
def _report_progress(progress: Progress | None, total_bytes: int) -> Iterator[None]:
    """Report the progress of transformers' loading inside the scope, in place of its own bar."""

    def count(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
        items = list(kwargs.get("iterable", args[0] if args else ()))
        for number, item in enumerate(items, 1):
            yield item
            if progress is not None:
                progress(total_bytes * number // len(items), total_bytes)

    hook = logging.set_tqdm_hook(count)
    try:
        yield
    finally:
        logging.set_tqdm_hook(hook)


def _remove_hooks(model: nn.Module) -> None:
    """Remove accelerate's hooks, since duoka's own movers bring tensors to modules."""
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model, recurse=True)
    model.__dict__.pop("hf_device_map", None)

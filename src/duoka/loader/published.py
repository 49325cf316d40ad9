"""Loading checkpoints that were published quantized: transformers does it, with further packages.

What the packages make of the tensors is theirs; this room sees to it that they are there, and that
what fails is told as every other failure to load.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import PreTrainedModel

from duoka.errors import LoadError
from duoka.models import resolve
from duoka.placement import Placement
from duoka.prequantized import Method, method_of, without_quantization

# What the packages and transformers raise where a device, a version or a file doesn't suit them.
_FAILURES = (ImportError, OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError)


def load_published(path: Path, config: dict[str, object], placement: Placement) -> PreTrainedModel:
    """Load a checkpoint that was published quantized, each module onto its device.

    Parameters
    ----------
    path : Path
        Its directory.
    config : dict
        What its ``config.json`` holds.
    placement : Placement

    Raises
    ------
    LoadError
        If a package is missing, transformers can't keep this format packed, or loading fails.
    """
    method = method_of(config)
    assert method is not None, "load_weights is for the others"
    _refuse_unloadable(method)
    _, model_class = resolve(without_quantization(config))
    try:
        model: PreTrainedModel = model_class.from_pretrained(
            path, dtype="auto", device_map=dict(placement.entries)
        )
    except _FAILURES as error:
        raise LoadError(
            f"transformers can't load this {method.name} checkpoint here: {str(error)[:300]}",
            hint="the plan can be exported to an engine that runs it, or take the 16-bit weights",
        ) from error
    _unhook(model)
    model.eval()
    return model


def _refuse_unloadable(method: Method) -> None:
    if not method.keeps:
        raise LoadError(
            f"transformers unpacks {method.name} weights into 16 bit on first use: they would take "
            "more memory than was planned",
            hint="run the plan with an engine that keeps them packed, as vLLM or SGLang",
        )
    for package in ("accelerate", method.package):
        if package is not None and find_spec(package.replace("-", "_")) is None:
            raise LoadError(
                f"running a {method.name} checkpoint needs {package}, which isn't installed",
                hint=f"pip install {package}",
            )


def _unhook(model: torch.nn.Module) -> None:
    """Remove what accelerate put on the modules: duoka moves what must move itself."""
    from accelerate.hooks import remove_hook_from_module

    remove_hook_from_module(model, recurse=True)
    model.__dict__.pop("hf_device_map", None)

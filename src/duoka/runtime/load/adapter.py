"""Reads adapters from files in peft's format, without trust in their content.

An adapter's modules and ranks are found from its tensors; its configuration must agree, and gives
the scaling. All but plain LoRA is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from duoka.checkpoint.adapters import CONFIG, adapter_file, digest_of
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.headers import read_header, read_json, reading
from duoka.errors import CheckpointError
from duoka.forecast.workload import Workload
from duoka.models.adapter_stacks import add_stacks, fill_stacks
from duoka.models.from_checkpoint import build_model
from duoka.models.lora import LoraAdapter, LowRank, merge_adapter, native_form

from .pickles import load_pickle

_UNLIKE = "both files must belong to one adapter: download it again"
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>[\w.]+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])"
    r"(?:\.default)?(?:\.weight)?",
    re.ASCII,
)
_MODULE = re.compile(r"\^?[\w.]+", re.ASCII)
# Settings that may change the arithmetic or the base model, with their harmless values.
_PLAIN: dict[str, tuple[object, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),
}
# Settings of adapters other than plain LoRA, all unset in plain LoRA.
_OTHER_KINDS = (
    *("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters"),
    *("lora_bias", "alora_invocation_tokens", "layer_replication"),
)


def read_adapter(directory: Path) -> LoraAdapter:
    """Read a LoRA adapter; its layers have the module names in the file.

    Raises
    ------
    CheckpointError
        If the directory has no adapter, or one that is damaged or other than plain LoRA.
    """
    path = adapter_file(directory)
    config = read_json(directory / CONFIG)
    _refuse_other_kinds(directory, config)
    parts: dict[str, dict[str, Tensor]] = {}
    embeddings = set()
    for name, tensor in _read_tensors(path).items():
        match = _TENSOR.fullmatch(name)
        if match is None or tensor.ndim < 2 or not tensor.is_floating_point():
            raise _other_adapter_error(directory, f"it contains {name[:80]!r}")
        parts.setdefault(match["module"], {})[match["side"]] = tensor
        if match["embedding"]:
            embeddings.add(match["module"])
    layers = {
        name: _make_layer(path, name, sides, config, is_embedding=name in embeddings)
        for name, sides in parts.items()
    }
    if not layers:
        raise CheckpointError(f"{path} contains no tensors")
    base = config.get("base_model_name_or_path")
    return LoraAdapter(layers=layers, base=base if isinstance(base, str) else "")


def _read_adapters(checkpoint: Checkpoint, workload: Workload) -> dict[str, LoraAdapter]:
    """Read the adapters of a workload, by name, in native form.

    Raises
    ------
    CheckpointError
        If an adapter isn't the one of the plan; and as for `read_adapter`.
    """
    adapters = {}
    for (name, directory), digest in zip(workload.adapters, workload.adapter_digests, strict=True):
        if digest != digest_of(directory):
            raise CheckpointError(
                f"{directory} has another adapter than the one that the plan was made for",
                hint="make the plan again (--replan)",
            )
        adapters[name] = native_form(read_adapter(Path(directory)), checkpoint.config)
    return adapters


def build_to_serve(checkpoint: Checkpoint, workload: Workload) -> PreTrainedModel:
    """Build a model as `build_model` does, with stacks for the adapters of its workload."""
    model = build_model(checkpoint, workload)
    if workload.adapters:
        add_stacks(model, _read_adapters(checkpoint, workload))
    return model


def apply_adapters(
    model: PreTrainedModel, checkpoint: Checkpoint, workload: Workload, merged: LoraAdapter | None
) -> None:
    """Merge an adapter into a loaded model, and fill the stacks of `build_to_serve`."""
    if merged is not None:
        merge_adapter(model, native_form(merged, checkpoint.config))
    fill_stacks(model, _read_adapters(checkpoint, workload))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file or a pickle, by name."""
    if path.suffix == ".bin":
        return load_pickle(path, map_location="cpu")
    read_header(path)
    with reading(path):
        return load_file(path)


def _refuse_other_kinds(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the configuration is of an adapter other than plain LoRA."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise _other_adapter_error(directory, f"peft_type is {str(kind)[:40]!r}")
    strange = [key for key in _OTHER_KINDS if config.get(key)]
    strange += [key for key, plain in _PLAIN.items() if config.get(key, plain[0]) not in plain]
    if strange:
        raise _other_adapter_error(directory, f"{strange[0]} is {str(config[strange[0]])[:40]!r}")


def _other_adapter_error(directory: Path, fact: str) -> CheckpointError:
    """Return the error for an adapter other than plain LoRA, as shown by a fact."""
    return CheckpointError(
        f"{directory} has an adapter other than plain LoRA: {fact}",
        hint="merge it into its model with the tool that created it, and use that model",
    )


def _make_layer(
    path: Path,
    name: str,
    sides: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    is_embedding: bool,
) -> LowRank:
    """Make the low-rank layer of one module from lora_A and lora_B; check their rank."""
    if len(sides) < 2:
        raise CheckpointError(f"{path} has only one of lora_A and lora_B for {name}", hint=_UNLIKE)
    down, up = sides["A"], sides["B"]
    rank = _get_setting(path, config, "r", "rank_pattern", name)
    if not len(down) == up.shape[1] == rank:
        raise CheckpointError(
            f"{path} has lora_A {list(down.shape)} and lora_B {list(up.shape)} for {name}, and its "
            f"rank is {rank:g}",
            hint=_UNLIKE,
        )
    alpha = _get_setting(path, config, "lora_alpha", "alpha_pattern", name)
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(down=down, up=up, scaling=scaling, is_embedding=is_embedding)


def _get_setting(path: Path, config: Mapping[str, Any], key: str, pattern: str, name: str) -> float:
    """Return the setting `key` for a module; the first matching entry of `pattern` overrides."""
    value: Any = config.get(key)
    patterns = config.get(pattern) or {}
    for end in patterns if isinstance(patterns, dict) else ():
        # peft reads entries as regular expressions, which an attacker can make run for ever.
        if not _MODULE.fullmatch(end):
            raise CheckpointError(f"{pattern} of {path.parent / CONFIG} has {end[:80]!r} in it")
        if name == end.removeprefix("^") or name.endswith(f".{end}"):
            value = patterns[end]
            break
    if type(value) not in (int, float) or not 0 < value < 2**31:
        raise CheckpointError(f"{path.parent / CONFIG} says that {key} is {str(value)[:40]!r}")
    return float(value)

"""Config: the settings of ``config.json`` for planning, and limits against hostile files.

A config decides how many modules are built. Without limits, one line of a hostile config could keep
a computer busy for days or exhaust its memory before a weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import InvalidVersion, Version

from duoka.errors import CheckpointError

MAX_CONFIG_BYTES = 8 * 2**20  # the longest published ones have some 100 KB
_HINT = "use the config.json that was published with the model"
_MAX_DEPTH = 32
_MAX_LAYERS = 1000  # the deepest published models have some 160; ten thousand take a minute
_MAX_MODULES = 2_000_000  # layers times experts
_MAX_SIZE = 2**26  # positions, words, widths; the longest published context is 10 million
_MAX_INTEGER = 10**40  # tokenizers say 10**30 for "no limit"

_MODEL_DTYPES = ("float16", "bfloat16", "float32", "float64")
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "seq_length",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
)
# Keys of layer counts, and of tensor sizes. A key such as vision_feature_layer is an index, not a
# count, and may be negative; so the patterns match no more than needed.
_LAYERS = re.compile(
    r"layers|depths?|(?:en|de)coder_layers|n_layers?|num_blocks|(?:\w+_)?num_(?:\w+_)?layers",
    re.ASCII,
)
_SIZES = re.compile(
    r"(?:\w+_)?(?:size|dims?|positions|position_embeddings|seq_len|sequence_length|seq_length|n_ctx"
    r"|channels|d_model|d_ff|n_embd|n_inner|rank|experts|heads?|groups?|group_num|stages?)",
    re.ASCII,
)


def check_config(config: dict[str, Any], *, num_tensors: int | None, source: str) -> None:
    """Refuse a config with numbers beyond the limits, or more layers than there are tensors."""
    layers = experts = 0
    for key, value in values(config, source):
        if type(value) is not int:
            continue
        limit = _limit(key)
        if abs(value) > limit or (value < 0 and _LAYERS.fullmatch(key)):
            number = f"{value}" if abs(value) < 10**30 else "a number of more than 30 digits"
            shown = key if len(key) <= 80 and key.isprintable() else ascii(key[:80])
            raise CheckpointError(
                f"{source}: {shown} is {number}; duoka supports 0 to {limit}", hint=_HINT
            )
        if _LAYERS.fullmatch(key):
            layers = max(layers, value)
        elif key.endswith("experts"):
            experts = max(experts, value)
    if layers * experts > _MAX_MODULES:
        raise CheckpointError(
            f"{source}: {layers} layers of {experts} experts exceed the limit of {_MAX_MODULES} "
            "modules",
            hint=_HINT,
        )
    if num_tensors is not None and layers > num_tensors:
        raise CheckpointError(
            f"{source} declares {layers} layers, but the weights have only {num_tensors} tensors",
            hint="use config.json and weights of the same model",
        )


def _limit(key: str) -> int:
    """Return the largest number that a key may have."""
    if _LAYERS.fullmatch(key):
        return _MAX_LAYERS
    return _MAX_SIZE if _SIZES.fullmatch(key) else _MAX_INTEGER


def values(config: Mapping[str, Any], source: str) -> Iterator[tuple[str, Any]]:
    """Yield every number and text with its key; elements of a list have the list's key."""
    level: list[tuple[str, Any]] = list(config.items())
    for _ in range(_MAX_DEPTH):
        deeper: list[tuple[str, Any]] = []
        for key, value in level:
            if isinstance(value, dict):
                deeper.extend(value.items())
            elif isinstance(value, list):
                deeper.extend((key, item) for item in value)
            else:
                yield key, value
        if not deeper:
            return
        level = deeper
    raise CheckpointError(f"{source} is nested more than {_MAX_DEPTH} levels deep", hint=_HINT)


def default_dtype(config: dict[str, Any]) -> str | None:
    """Return the weights' dtype in a config, as torch names it; None if absent or not floating."""
    parts, keys = _with_text_config(config), ("dtype", "torch_dtype")
    names = (str(part.get(key)).removeprefix("torch.") for part in parts for key in keys)
    return next((name for name in names if name in _MODEL_DTYPES), None)


def commonest_dtype(sizes: dict[str, int]) -> str | None:
    """Return the floating-point dtype with the most bytes in `sizes`; None if there is none."""
    models = {name: size for name, size in sizes.items() if name in _MODEL_DTYPES}
    return max(models, key=models.__getitem__, default=None)


def max_context_tokens(config: dict[str, Any]) -> int | None:
    """Return the longest context in tokens stated in a config; None if not stated."""
    values = (part.get(key) for part in _with_text_config(config) for key in _CONTEXT_KEYS)
    return next((value for value in values if type(value) is int and value > 0), None)


def _with_text_config(config: dict[str, Any]) -> list[dict[str, Any]]:
    """List the config, and the language model's part of it if present."""
    nested = (config.get(key) for key in _TEXT_CONFIGS)
    return [config, *(part for part in nested if isinstance(part, dict))]


def is_for_transformers4(config: Mapping[str, Any]) -> bool:
    """Return True for a config written for transformers 4, or one without a valid version."""
    written_for = config.get("transformers_version")
    try:
        return written_for is None or Version(str(written_for)).major < 5
    except InvalidVersion:
        return True

"""Adapters: target modules, in published names and in the names of duoka's classes; files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from duoka.base.files import read_bytes
from duoka.errors import CheckpointError, UsageError

from .architecture import CHATGLM
from .checkpoint import Checkpoint
from .headers import read_header, reading

CONFIG = "adapter_config.json"
_FILES = ("adapter_model.safetensors", "adapter_model.bin")
_NAME = re.compile(r"[\w.:/-]{1,200}")
_MOST_BYTES = 2**34

# Modules of the ChatGLM family that can have adapters: published name, names in duoka's class.
_CHATGLM_LAYERS = {
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "dense": ("o_proj",),
    "dense_h_to_4h": ("gate_up_proj",),
    "dense_4h_to_h": ("down_proj",),
    "word_embeddings": ("embed_tokens",),
    "output_layer": ("lm_head",),
}
# Modules of GLM-4V's tower, which keep their published names.
_TOWER_LAYERS = {
    *("query_key_value", "dense", "fc1", "fc2"),
    *("linear_proj", "gate_proj", "dense_h_to_4h", "dense_4h_to_h"),
}
_IN_TOWER = frozenset({"vision", "attention", "linear_proj"})
# Enclosing modules in published names, and their names in duoka's class ("" if they have none).
_AROUND = {"transformer": "", "encoder": "", "embedding": "", "self_attention": "self_attn."}


def adapter_file(directory: Path) -> Path:
    """Return the file with the tensors of an adapter; raise CheckpointError if there is none."""
    path = next((directory / name for name in _FILES if (directory / name).is_file()), None)
    if path is None or not (directory / CONFIG).is_file():
        raise CheckpointError(
            f"{directory} has no adapter",
            hint=f"give the directory that contains {CONFIG} and {_FILES[0]}",
        )
    return path


def digest_of(directory: str) -> str:
    """Return a hash of the names and shapes of an adapter's tensors (of a whole pickle)."""
    path = adapter_file(Path(directory))
    if path.suffix == ".bin":
        with reading(path):
            content = read_bytes(path, most_bytes=_MOST_BYTES)
    else:
        shapes = {name: tensor.shape for name, tensor in read_header(path).items()}
        content = json.dumps(shapes, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:32]


def parse_adapter(text: str) -> tuple[str, str]:
    """Parse NAME=DIR: the name of an adapter, and its directory as an absolute path."""
    name, _, directory = text.partition("=")
    return name, str(Path(directory).absolute()) if directory else ""


def check_adapters(adapters: Sequence[tuple[str, str]], cache: str, *, is_paged: bool) -> None:
    """Raise UsageError for adapters without a paged cache, a directory, or a name of their own."""
    if adapters and not is_paged:
        raise UsageError(
            f"the KV cache is {cache}; requests choose adapters only over a paged one",
            hint="plan with --serve, without --offload and --images; or merge one adapter into the "
            "weights (duoka serve --adapter DIR)",
        )
    names = [name for name, _ in adapters]
    for name, directory in adapters:
        if not (directory and _NAME.fullmatch(name) and names.count(name) == 1):
            raise UsageError(
                f"adapter {'='.join((name, directory)).strip('=')[:80]!r} isn't NAME=DIR with a "
                "name of its own",
                hint="use letters, digits and . : / - _ in the name: --adapter sql=run/adapter",
            )


def native_targets(checkpoint: Checkpoint, targets: Sequence[str]) -> tuple[str, ...]:
    """Translate LoRA targets into module names of the class that is built for a checkpoint."""
    if checkpoint.config.get("model_type") != CHATGLM or checkpoint.builds_own_model:
        return tuple(targets)
    return chatglm_targets(targets, has_tower=bool(checkpoint.config.get("vision_config")))


def chatglm_targets(targets: Sequence[str], *, has_tower: bool) -> tuple[str, ...]:
    """Translate a ChatGLM's LoRA targets, in names of either class, to names of duoka's class."""
    return tuple(dict.fromkeys(name for target in targets for name in _native(target, has_tower)))


def _native(target: str, has_tower: bool) -> Iterator[str]:
    """Yield the names of a target in duoka's class: of the language model, the tower, or both."""
    *parents, leaf = target.split(".")
    shared = leaf in _TOWER_LAYERS and leaf in _CHATGLM_LAYERS
    in_tower = leaf in _TOWER_LAYERS if not shared else not _IN_TOWER.isdisjoint(parents)
    if not (has_tower and in_tower):
        prefix = "".join(_AROUND.get(part, f"{part}.") for part in parents)
        yield from (f"{prefix}{name}" for name in _CHATGLM_LAYERS.get(leaf, (leaf,)))
    if has_tower and (in_tower or (shared and not parents)):
        yield target.removeprefix("transformer.")

"""Adapters: target modules, in published names and in the names of duoka's classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .architecture import CHATGLM
from .checkpoint import Checkpoint

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

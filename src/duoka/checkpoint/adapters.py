"""Adapters: the modules that have them, by the names of a checkpoint and of duoka's classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .architecture import CHATGLM
from .checkpoint import Checkpoint

# The modules of the ChatGLM family that can have adapters, published and as duoka has them.
_CHATGLM_LAYERS = {
    "query_key_value": ("q_proj", "k_proj", "v_proj"),
    "dense": ("o_proj",),
    "dense_h_to_4h": ("gate_up_proj",),
    "dense_4h_to_h": ("down_proj",),
    "word_embeddings": ("embed_tokens",),
    "output_layer": ("lm_head",),
}
# Those of GLM-4V's tower, which keep their published names.
_TOWER_LAYERS = {
    *("query_key_value", "dense", "fc1", "fc2"),
    *("linear_proj", "gate_proj", "dense_h_to_4h", "dense_4h_to_h"),
}
_IN_TOWER = frozenset({"vision", "attention", "linear_proj"})
# What lies around layers in the published names alone, and what is called otherwise.
_AROUND = {"transformer": "", "encoder": "", "embedding": "", "self_attention": "self_attn."}


def native_targets(checkpoint: Checkpoint, targets: Sequence[str]) -> tuple[str, ...]:
    """LoRA targets in the names of the class that is built."""
    if checkpoint.config.get("model_type") != CHATGLM or checkpoint.builds_own_model:
        return tuple(targets)
    return chatglm_targets(targets, has_tower=bool(checkpoint.config.get("vision_config")))


def chatglm_targets(targets: Sequence[str], *, has_tower: bool) -> tuple[str, ...]:
    """LoRA targets of a ChatGLM, published or not, in the names of duoka's class."""
    return tuple(dict.fromkeys(name for target in targets for name in _native(target, has_tower)))


def _native(target: str, has_tower: bool) -> Iterator[str]:
    """A target of a ChatGLM, which may be in its published names, in those of duoka's class."""
    *around, leaf = target.split(".")
    shared = leaf in _TOWER_LAYERS and leaf in _CHATGLM_LAYERS
    in_tower = leaf in _TOWER_LAYERS if not shared else not _IN_TOWER.isdisjoint(around)
    if not (has_tower and in_tower):
        prefix = "".join(_AROUND.get(part, f"{part}.") for part in around)
        yield from (f"{prefix}{name}" for name in _CHATGLM_LAYERS.get(leaf, (leaf,)))
    if has_tower and (in_tower or (shared and not around)):
        yield target.removeprefix("transformer.")

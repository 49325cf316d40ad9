"""Adapters: which modules can have them, by the names of a checkpoint and of duoka's classes."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Sequence

from duoka.errors import UsageError

from .architecture import CHATGLM, renames_tensors
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
    """LoRA targets in the names of the class that is built; UsageError for what isn't there."""
    is_chatglm = checkpoint.config.get("model_type") == CHATGLM and not checkpoint.builds_own_model
    known = _stored_layers(checkpoint)
    has_tower = bool(checkpoint.config.get("vision_config"))
    if is_chatglm:
        native = (name for names in _CHATGLM_LAYERS.values() for name in names)
        known = {*_CHATGLM_LAYERS, *native, *(_TOWER_LAYERS if has_tower else ())}
    for target in targets:
        if known and target.rpartition(".")[2] not in known:
            raise unknown_target(target, known)
    if not is_chatglm:
        return tuple(targets)
    return tuple(dict.fromkeys(name for target in targets for name in _native(target, has_tower)))


def _stored_layers(checkpoint: Checkpoint) -> set[str]:
    """What the modules with matrices are called; nothing where that isn't known."""
    if renames_tensors(str(checkpoint.config.get("model_type"))):
        return set()  # the model that is built tells, once transformers is imported
    matrices = (
        name.split(".")[:-1]
        for name, tensor in (checkpoint.tensors or {}).items()
        if tensor.shape is None or len(tensor.shape) > 1
    )
    stored = {parts[-1] for parts in matrices if parts and not parts[-1].isdecimal()}
    # An index tells no shapes; and a head may be tied, and not be stored.
    layers = {name for name in stored if "norm" not in name}
    return layers | {"lm_head"} if layers else layers


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


def unknown_target(target: str, known: Collection[str]) -> UsageError:
    """The error that a module is which can't have adapters."""
    nearest = difflib.get_close_matches(target.rpartition(".")[2], sorted(known), n=1)
    return UsageError(
        f"no module that can have adapters is called {target[:60]!r}"
        + (f"; did you mean {nearest[0]!r}?" if nearest else ""),
        hint=f"LoRA targets are ends of names: {', '.join(sorted(known))}",
    )

"""Adapters: which modules can have them, by the names of a checkpoint and of duoka's classes."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

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
# What lies around layers in the published names alone, and what is called otherwise.
_AROUND = {"transformer": "", "encoder": "", "embedding": "", "self_attention": "self_attn."}


def native_targets(checkpoint: Checkpoint, targets: Sequence[str]) -> tuple[str, ...]:
    """LoRA targets in the names of the class that is built; UsageError for what isn't there."""
    is_chatglm = checkpoint.config.get("model_type") == CHATGLM and not checkpoint.builds_own_model
    known = _stored_layers(checkpoint)
    if is_chatglm:
        native = (name for names in _CHATGLM_LAYERS.values() for name in names)
        known = {*_CHATGLM_LAYERS, *native}
    for target in targets:
        if known and target.rpartition(".")[2] not in known:
            raise unknown_target(target, known)
    return tuple(_native(targets)) if is_chatglm else tuple(targets)


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


def _native(targets: Sequence[str]) -> dict[str, None]:
    """The targets of a ChatGLM, which may be in its published names, in those of duoka's class."""
    native: dict[str, None] = {}
    for target in targets:
        *around, leaf = target.split(".")
        prefix = "".join(_AROUND.get(part, f"{part}.") for part in around)
        native |= {f"{prefix}{name}": None for name in _CHATGLM_LAYERS.get(leaf, (leaf,))}
    return native


def unknown_target(target: str, known: Collection[str]) -> UsageError:
    """The error that a module is which can't have adapters."""
    nearest = difflib.get_close_matches(target.rpartition(".")[2], sorted(known), n=1)
    return UsageError(
        f"no module that can have adapters is called {target[:60]!r}"
        + (f"; did you mean {nearest[0]!r}?" if nearest else ""),
        hint=f"LoRA targets are ends of names: {', '.join(sorted(known))}",
    )

"""Architecture: refuse configs for which neither duoka nor transformers has a model class.

The config alone decides, without importing torch, which takes seconds. Models with code in their
checkpoint are not judged here.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.version import Version

from duoka.errors import ModelError

CHATGLM = "chatglm"
CHATGLM_NAMES = {
    "padded_vocab_size": "vocab_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "multi_query_group_num": "num_key_value_heads",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "rms_norm_eps",
    "add_qkv_bias": "attention_bias",
    "seq_length": "max_position_embeddings",
}
"""transformers' names of the settings in a config of the ChatGLM family, by published name."""

# Settings with the same value in every published ChatGLM2, ChatGLM3 and GLM-4; any other value
# means another architecture.
_FIXED = {
    "add_bias_linear": False,
    "apply_residual_connection_post_layernorm": False,
    "multi_query_attention": True,
    "post_layer_norm": True,
    "rmsnorm": True,
    "fp32_residual_connection": False,
}
_MODEL_TYPE = re.compile(r"[\w.+-]{1,100}", re.ASCII)
_NAMED_TYPE = re.compile(r'[("]([a-z][\w.+-]*)"', re.ASCII)
# Attention that FlashAttention doesn't have: soft caps, sinks, and values with a head size of their
# own.
_UNLIKE_FLASH = re.compile(
    r'"((attn_logit_softcapping|kv_lora_rank|v_head_dim)": \d|'
    r'model_type": "(gemma2|vaultgemma|gpt_oss|granite_swa|granitemoe_swa|flint))'
)
_LATENT = re.compile(r'"(kv_lora_rank|v_head_dim)": ')
_HEAD_DIM = re.compile(r'head_dim": (\d+)')  # some models have another one in some layers
_MOST_HEAD_DIM, _HEAD_DIM_MULTIPLE = 256, 8
_FIRST_TORCH = Version("2.13")  # the first one whose `varlen_attn` has all that the engine needs
_OF_IMAGES = re.compile(r'(vision|image|visual|pixel|patch)[^"]*":')


def refuse_unbuildable(config: Mapping[str, Any]) -> None:
    """Raise ModelError if no model can be built from a config."""
    model_type = model_type_of(config)
    known = _listed_types()
    # A program that has imported transformers may have registered further types.
    if known and model_type not in known and "transformers" not in sys.modules:
        raise unknown_type(model_type, known, has_code="auto_map" in config)
    if model_type == CHATGLM:
        refuse_other_chatglm(config)


def refuse_images(config: Mapping[str, Any]) -> None:
    """Raise ModelError if a config has no setting for images."""
    if not _OF_IMAGES.search(json.dumps(config)):
        raise ModelError(
            f"the model takes no images: config.json (model_type {config.get('model_type')!r}) "
            "has no vision configuration",
            hint="omit the images, or use a vision-language model",
        )


def reads_block_tables(config: Mapping[str, Any]) -> bool:
    """Return True if FlashAttention can read the KV cache of a model in place, by block tables.

    False with `DUOKA_ATTENTION=gather`, and for a torch that lacks it.
    """
    text = config.get("text_config")
    sizes = {**config, **text} if isinstance(text, Mapping) else dict(config)

    def find(*names: str) -> int:
        values = (sizes.get(name) for name in names)
        return next((value for value in values if isinstance(value, int)), 0)

    heads = find("num_attention_heads", "n_head", "n_heads")
    head_dim = find("head_dim", "kv_channels")
    head_dim = head_dim or find("hidden_size", "n_embd", "d_model") // (heads or 1)
    text_form = json.dumps(config)
    head_dims = [head_dim, *map(int, _HEAD_DIM.findall(json.dumps(sizes)))]
    # Latent attention (MLA) expands keys and values, which may have the same size.
    key_dim = find("qk_nope_head_dim") + find("qk_rope_head_dim")
    if key_dim and key_dim == find("v_head_dim"):
        head_dims, text_form = [key_dim], _LATENT.sub("", text_form)
    return (
        os.environ.get("DUOKA_ATTENTION") != "gather"
        and Version(version("torch")) >= _FIRST_TORCH
        and 0 < min(head_dims) <= max(head_dims) <= _MOST_HEAD_DIM
        and not any(size % _HEAD_DIM_MULTIPLE for size in head_dims)
        and not _UNLIKE_FLASH.search(text_form)
    )


def caches_latents(config: Mapping[str, Any]) -> bool:
    """Return True if transformers' class of a model can cache the latents of its attention (MLA).

    Such classes expand latents in a method of their own, since transformers 5.23.
    """
    text = config.get("text_config")
    sizes = {**config, **text} if isinstance(text, Mapping) else config
    name, package = str(sizes.get("model_type")), find_spec("transformers")
    if not sizes.get("kv_lora_rank") or package is None or package.origin is None:
        return False
    path = Path(package.origin).parent / "models" / name / f"modeling_{name}.py"
    return path.is_file() and "def expand_kv(" in path.read_text(encoding="utf-8")


def model_type_of(config: Mapping[str, Any]) -> str:
    """Return a config's model type; raise ModelError if it is missing or invalid."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and _MODEL_TYPE.fullmatch(model_type):
        return model_type
    message = "the configuration has no model_type"
    if model_type is not None:
        shown = f"{str(model_type)[:60]!a}"
        message = f"the configuration's model_type is {shown}, which is not a valid name"
    hint = "use the config.json that was published with the model, or one written by transformers"
    raise ModelError(message, hint=hint)


def unknown_type(model_type: str, known: Collection[str], *, has_code: bool) -> ModelError:
    """Make the error for an unknown model type, with the nearest known types."""
    nearest = difflib.get_close_matches(model_type, sorted(known), n=3)
    hints = [f"did you mean {' or '.join(map(repr, nearest))}?"] if nearest else []
    if has_code:
        hints.append(
            "the checkpoint has its own model code, which needs --trust-remote-code and the code "
            "files beside config.json"
        )
    return ModelError(
        f"model_type {model_type!r} is supported neither by duoka nor by transformers "
        f"{version('transformers')}",
        hint="; ".join(hints) or "a newer version of transformers may support it",
    )


@cache
def _listed_types() -> set[str]:
    """Read transformers' model types from its source, without an import; empty if not found."""
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return set()
    folder = Path(package.origin).parent / "models" / "auto"
    paths = [folder / "configuration_auto.py", folder / "auto_mappings.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in paths if path.is_file())
    return {CHATGLM, *_NAMED_TYPE.findall(text)} if text else set()


def refuse_other_chatglm(config: Mapping[str, Any]) -> None:
    """Raise ModelError for a config of type "chatglm" with an unsupported architecture."""
    if "position_encoding_2d" in config or "inner_hidden_size" in config:
        raise ModelError(
            "this is the first-generation ChatGLM-6B, a different architecture",
            hint="ChatGLM2, ChatGLM3 and GLM-4 are supported",
        )
    for name, value in _FIXED.items():
        if config.get(name, value) != value:
            raise ModelError(
                f"{name} is {config[name]!r}; the ChatGLM family supports only {value!r}"
            )

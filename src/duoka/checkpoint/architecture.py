"""Architecture: why no model of duoka's or transformers' can be built of a config.

What the config alone tells is told here, because nothing here imports torch, which takes seconds.
Models whose code comes with their checkpoint are none of these.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from duoka.errors import ModelError

from .config import values

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
"""The published names in a config of the ChatGLM family, and transformers' names for the same."""

# What every published checkpoint of these generations has; another value is another architecture.
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
# What is a whole number in every config that names it, and, but for layers and positions, not 0.
_WHOLE = re.compile(
    r"(?P<counted>(?:(?:ffn_)?hidden|intermediate|(?:padded_)?vocab)_size"
    r"|num_(?:attention|key_value)_heads|multi_query_group_num|kv_channels)"
    r"|num_(?:hidden_)?layers|max_position_embeddings|seq_length",
    re.ASCII,
)
_OF_IMAGES = re.compile(r'(vision|image|visual|pixel|patch)[^"]*":')
_PUBLISHED = "compare config.json with the published one"


def refuse_unbuildable(config: Mapping[str, Any]) -> None:
    """Raise ModelError where the config alone tells that no model can be built of it."""
    model_type = model_type_of(config)
    known = _listed_types()
    if model_type not in known:
        if known and "transformers" not in sys.modules:
            raise unknown_type(model_type, known, has_code="auto_map" in config)
        return  # whoever has imported transformers may have registered it
    for key, value in values(config, "config.json"):
        _refuse_other_kinds(key, value)
    if model_type == CHATGLM:
        refuse_other_chatglm(config)
        if config.get("vision_config") is not None:
            refuse_other_tower(config["vision_config"])
            _refuse_other_marks(config)


def refuse_images(config: Mapping[str, Any]) -> None:
    """Raise ModelError where nothing in a config is about images."""
    if not _OF_IMAGES.search(json.dumps(config)):
        raise ModelError(
            f"the model takes no images: its config.json (model_type {config.get('model_type')!r}) "
            "has no part that sees",
            hint="leave the images out, or take a model for images and text",
        )


def model_type_of(config: Mapping[str, Any]) -> str:
    """The type of model that a config names."""
    model_type = config.get("model_type")
    if isinstance(model_type, str) and _MODEL_TYPE.fullmatch(model_type):
        return model_type
    raise ModelError(
        "the configuration has no model_type"
        if model_type is None
        else f"the configuration's model_type is {str(model_type)[:60]!a}, which is no name",
        hint="give a config.json as transformers writes it, or as the model was published with",
    )


def unknown_type(model_type: str, known: Collection[str], *, has_code: bool) -> ModelError:
    """The error that a type of model is which nothing here can build."""
    nearest = difflib.get_close_matches(model_type, sorted(known), n=3)
    hints = [f"did you mean {' or '.join(map(repr, nearest))}?"] if nearest else []
    if has_code:
        hints.append(
            "the checkpoint brings its own model code, which runs only with --trust-remote-code, "
            "from files beside its config.json"
        )
    return ModelError(
        f"model_type {model_type!r} is neither one of duoka's families nor known to "
        f"transformers {version('transformers')}",
        hint="; ".join(hints) or "a newer transformers may know it",
    )


@cache
def _listed_types() -> set[str]:
    """The types that transformers lists, without importing it; none where that doesn't work."""
    text = _transformers_source("models/auto/configuration_auto.py")
    text += _transformers_source("models/auto/auto_mappings.py")
    return {CHATGLM, *_NAMED_TYPE.findall(text)} if text else set()


@cache
def renames_tensors(model_type: str) -> bool:
    """Whether transformers' class for a type has other names than its checkpoints may have."""
    return f'"{model_type}"' in _transformers_source("conversion_mapping.py")


def _transformers_source(file: str) -> str:
    """A file of transformers, which takes seconds to import; nothing where there is none."""
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return ""
    path = Path(package.origin).parent / file
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _refuse_other_kinds(key: str, value: Any) -> None:
    """Refuse what is no number where every model has one, and nothing of what each has some."""
    match = _WHOLE.fullmatch(key)
    if match is None or value is None:
        return
    least = 1 if match["counted"] else 0
    if type(value) not in (int, float) or value != int(value) or value < least:
        raise ModelError(
            f"the configuration's {key} is {value!r:.60}; it must be a whole number, at least "
            f"{least}",
            hint=_PUBLISHED,
        )


def refuse_other_chatglm(config: Mapping[str, Any]) -> None:
    """Raise ModelError for what has the family's model type, and isn't one of its models."""
    if "position_encoding_2d" in config or "inner_hidden_size" in config:
        raise ModelError(
            "this is ChatGLM-6B of the first generation, which is another architecture",
            hint="ChatGLM2, ChatGLM3 and GLM-4 are supported",
        )
    for name, value in _FIXED.items():
        if config.get(name, value) != value:
            raise ModelError(
                f"{name} is {config[name]!r}; the ChatGLM family is built for {value!r} only"
            )
    _refuse_parts(config)


def _refuse_parts(config: Mapping[str, Any]) -> None:
    """Refuse a published config that lacks a size, and sizes that don't go together."""
    sizes = {"hidden_size": "hidden_size", "num_attention_heads": "num_attention_heads"}
    sizes |= {old: new for old, new in CHATGLM_NAMES.items() if old != "add_qkv_bias"}
    missing = [old for old, new in sizes.items() if old not in config and new not in config]
    if missing and any(old in config for old in CHATGLM_NAMES):
        raise ModelError(
            f"the configuration of a ChatGLM says nothing of {', '.join(missing)}", hint=_PUBLISHED
        )
    heads = config.get("num_attention_heads")
    groups = config.get("multi_query_group_num", config.get("num_key_value_heads"))
    if isinstance(heads, int) and isinstance(groups, int) and (groups < 1 or heads % groups):
        raise ModelError(
            f"{heads} attention heads can't share the keys of {groups} groups equally",
            hint=_PUBLISHED,
        )


# What says of which sizes the tower of GLM-4V-9B is.
_TOWER = (
    "hidden_size",
    "num_hidden_layers",
    "num_heads",
    "intermediate_size",
    "patch_size",
    "image_size",
    "num_positions",
)


def refuse_other_tower(config: Any) -> None:
    """Raise ModelError for a ``vision_config`` that GLM-4V's tower can't be built of."""
    if not isinstance(config, Mapping):
        raise ModelError(
            f"the configuration's vision_config is {config!r:.60}; it must be an object",
            hint=_PUBLISHED,
        )
    missing = [name for name in _TOWER if name not in config]
    if missing:
        raise ModelError(f"the vision_config says nothing of {', '.join(missing)}", hint=_PUBLISHED)
    for name in (*_TOWER, "in_channels"):
        value, least = config.get(name, 3), 0 if name == "num_hidden_layers" else 1
        if type(value) is not int or value < least:
            raise ModelError(
                f"the vision_config's {name} is {value!r:.60}; it must be a whole number, at least "
                f"{least}",
                hint=_PUBLISHED,
            )
    fault = _tower_fault(config)
    if fault is not None:
        raise ModelError(f"in the vision_config {fault}", hint=_PUBLISHED)


def _tower_fault(config: Mapping[str, Any]) -> str | None:
    """What does not go together in a tower's sizes."""
    image, patch = config["image_size"], config["patch_size"]
    width, heads = config["hidden_size"], config["num_heads"]
    grid, scale = image // patch, config.get("scaling_factor", 8)
    if type(scale) not in (int, float) or not scale > 0:
        return f"scaling_factor is {scale!r:.60}; features are divided by it"
    if width % heads:
        return f"{heads} attention heads can't share a hidden_size of {width} equally"
    if grid < 2:
        return f"an image_size of {image} has {grid} patches of {patch} a side; there must be 2"
    if config["num_positions"] != grid**2 + 1:
        return (
            f"num_positions is {config['num_positions']}; {grid} x {grid} patches of {patch} in an "
            f"image_size of {image}, and one token before them, have {grid**2 + 1}"
        )
    return None


def _refuse_other_marks(config: Mapping[str, Any]) -> None:
    """Refuse tokens around pictures that the vocabulary doesn't have."""
    vocabulary = config.get("padded_vocab_size", config.get("vocab_size"))
    for name in ("boi_token_id", "eoi_token_id"):
        token = config.get(name, 0)
        if type(token) is not int or not 0 <= token < (vocabulary or token + 1):
            raise ModelError(
                f"the configuration's {name} is {token!r:.60}; it must be a token of the "
                f"{vocabulary} that there are",
                hint=_PUBLISHED,
            )

"""Build a model from its configuration: parameters on the meta device, buffers with values.

Supports any class of transformers, duoka's own families and, at the caller's request, a
checkpoint's remote code. No weights are read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from duoka.checkpoint.architecture import model_type_of, unknown_type
from duoka.errors import ModelError

from . import chatglm, glm4v, transformers4
from .meta import construct
from .remote_code import RemoteCode

# If the configuration names no class, a generating class is looked up in these mappings, in this
# order. For an encoder-decoder model the first two are swapped: its decoder can't run by itself.
_CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
_ENCODER_DECODER = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
_IMAGE = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
_REMOTE_CLASSES = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel")
_FREQUENCIES = re.compile(r"(^|[._])inv_freq$")


def build(
    config: Mapping[str, Any], *, dtype: torch.dtype | None = None, code: RemoteCode | None = None
) -> PreTrainedModel:
    """Build the model that a ``config.json`` describes, in evaluation mode, without weights.

    With remote `code` the class is imported from that code, even if transformers has a class for
    the model type. `dtype` is by default the configuration's.
    """
    parsed, model_class = resolve(config) if code is None else _load_remote(config, code)
    chosen = dtype or _stated_dtype(parsed)

    def make(default: torch.dtype) -> PreTrainedModel:
        model: PreTrainedModel = model_class._from_config(
            copy.deepcopy(parsed), dtype=default, attn_implementation=None
        )
        if code is not None and code.legacy:
            transformers4.finish_construction(model)
        return model

    try:
        model = construct(partial(make, chosen))
        # In 16 bit, rotary frequencies would be rounded: they are taken from a second model, built
        # in float32. Remote code keeps the frequencies of its constructor, as elsewhere.
        frequencies = _frequencies(model).values() if code is None else ()
        if any(buffer.dtype != torch.float32 for buffer in frequencies):
            for name, value in _frequencies(construct(partial(make, torch.float32))).items():
                owner, _, leaf = name.rpartition(".")
                model.get_submodule(owner)._buffers[leaf] = value
    except Exception as error:  # a model's constructor can raise anything
        raise ModelError(
            f"{model_class.__name__} could not be built from its configuration: {error}",
            hint="compare config.json with the published file",
        ) from error
    _keep_in_32_bit(model, chosen)
    model.tie_weights()
    model.eval()
    return model


def resolve(config: Mapping[str, Any]) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Return the parsed configuration and the native model class for a ``config.json``."""
    chatglm.register()
    glm4v.register()
    model_type = model_type_of(config)

    if model_type in CONFIG_MAPPING:
        parsed = _parse(CONFIG_MAPPING[model_type], config)
        return parsed, _native_class(parsed)
    raise unknown_type(model_type, CONFIG_MAPPING.keys(), has_code="auto_map" in config)


def _parse(config_class: type[PreTrainedConfig], config: Mapping[str, Any]) -> PreTrainedConfig:
    """Parse a configuration; raise ModelError for an invalid configuration."""
    try:
        return config_class.from_dict(_decode(dict(config)))
    except Exception as error:  # a configuration's own code can raise anything
        if isinstance(error, ModelError):
            raise
        # A strict dataclass names only the field; its cause has the reason.
        reason = error.__cause__ if isinstance(error, StrictDataclassError) else error
        raise ModelError(
            f"the configuration is not valid for model_type {config_class.model_type!r}: {reason}",
            hint="compare config.json with the published file",
        ) from error


def _decode(value: Any) -> Any:
    """Copy a JSON value; convert transformers' {"__float__": …} to infinity or NaN."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {name: _decode(item) for name, item in value.items()}
    return [_decode(item) for item in value] if isinstance(value, list) else value


def _native_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Choose the class named by the configuration, or a generating class if that has no head."""
    named = _named_class(config)
    bare = _mapped_class(modeling_auto.MODEL_MAPPING, config)
    if named is not None and named is not bare:
        return named
    mappings = [_CAUSAL, _ENCODER_DECODER, _IMAGE]
    if getattr(config, "is_encoder_decoder", False):
        mappings[:2] = _ENCODER_DECODER, _CAUSAL
    candidates = (_mapped_class(mapping, config) for mapping in mappings)
    model_class = next(filter(None, candidates), bare)
    if model_class is None:
        raise ModelError(f"transformers has no model class for model_type {config.model_type!r}")
    return model_class


def _named_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return the first suitable class in `architectures`; None if there is no such class."""
    stated = config.architectures
    for name in stated if isinstance(stated, list) else ():
        model_class = getattr(transformers, str(name), None)
        if not isinstance(model_class, type) or not issubclass(model_class, PreTrainedModel):
            continue
        if model_class.config_class is not None and isinstance(config, model_class.config_class):
            return model_class
    return None


def _mapped_class(mapping: Any, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """Return an Auto mapping's model class for a configuration; None if the mapping has none."""
    entry = mapping.get(type(config), None)
    model_class: type[PreTrainedModel] | None = entry[0] if isinstance(entry, tuple) else entry
    # A class for the text part of a composite model is not the class of the whole model.
    text = config.sub_configs.get("text_config")
    is_part = model_class is not None and text is not None and model_class.config_class is text
    return None if is_part else model_class


def _load_remote(
    config: Mapping[str, Any], code: RemoteCode
) -> tuple[PreTrainedConfig, type[PreTrainedModel]]:
    """Load configuration and model class from the checkpoint's own code."""
    auto_map = config.get("auto_map")
    references = auto_map if isinstance(auto_map, dict) else {}
    wanted = next((references[name] for name in _REMOTE_CLASSES if name in references), None)
    stated = references.get("AutoConfig")
    if not isinstance(wanted, str) or not isinstance(stated, str):
        raise ModelError(
            f"model_type {config.get('model_type')!r} is unknown, and the checkpoint's auto_map "
            "names no code for its configuration and model"
        )
    return _parse(code.import_class(stated), config), code.import_class(wanted)


def _stated_dtype(config: PreTrainedConfig) -> torch.dtype:
    """Return the dtype in a configuration or its parts; float32 if there is none."""
    parts = (config, *(getattr(config, name, None) for name in config.sub_configs))
    stated = (getattr(part, "dtype", None) for part in parts)
    dtypes = (getattr(torch, name, None) if isinstance(name, str) else name for name in stated)
    return next((dtype for dtype in dtypes if isinstance(dtype, torch.dtype)), torch.float32)


def _frequencies(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers with rotary frequencies, by name."""
    return {name: value for name, value in model.named_buffers() if _FREQUENCIES.search(name)}


def _keep_in_32_bit(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast parameters to float32 where the architecture requires, as transformers does."""
    patterns = [name.replace("*", ".*") for name in model._get_dtype_plan(dtype)]
    if not patterns:
        return
    pattern = re.compile("|".join(patterns))
    for name, parameter in list(model.named_parameters()):
        if pattern.search(name) and parameter.is_floating_point():
            owner, _, leaf = name.rpartition(".")
            wide = nn.Parameter(parameter.data.float(), requires_grad=parameter.requires_grad)
            model.get_submodule(owner)._parameters[leaf] = wide

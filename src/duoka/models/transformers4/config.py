"""Configurations with the attributes of transformers 4."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

# The defaults of 4.x. Since 5.0 the attributes of generation are in GenerationConfig only, and
# those of encoders and decoders, special tokens and pruning only in configurations that use them.
_DEFAULTS: dict[str, Any] = {
    **GenerationConfig._get_default_generation_params(),
    "is_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_word_embeddings": True,
    "tie_encoder_decoder": False,
    "pruned_heads": {},
    "torchscript": False,
    "use_bfloat16": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "sep_token_id": None,
    "decoder_start_token_id": None,
    "tokenizer_class": None,
    "prefix": None,
    "pretraining_tp": 1,
}

# Attributes that transformers 5 reads from any configuration → their names in legacy code.
_OTHER_NAMES = {
    "num_hidden_layers": ("num_layers", "n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "hidden_size": ("n_embd", "d_model"),
    "max_position_embeddings": ("seq_length", "n_positions", "model_max_length"),
    "vocab_size": ("padded_vocab_size",),
}


class LegacyConfig(PreTrainedConfig):
    """The base class ``PretrainedConfig`` of 4.x, with its default attributes."""

    # A plain attribute as in the file; in 5.0 it is a view of `rope_parameters` in another form.
    rope_scaling = None

    def __post_init__(self, **kwargs: Any) -> None:
        prepare: Any = super().__post_init__  # not annotated there
        prepare(**kwargs)
        for name in _DEFAULTS.keys() & kwargs.keys() - vars(self).keys():
            setattr(self, name, kwargs[name])  # 5.0 drops attributes of generation

    def __getattr__(self, name: str) -> Any:
        attributes = vars(self)
        for alias in _OTHER_NAMES.get(name, ()):
            if alias in attributes:
                return attributes[alias]
        if name in _DEFAULTS:
            return _DEFAULTS[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _get_generation_parameters(self) -> dict[str, Any]:
        """Return no parameters: 5.0 refuses a configuration with parameters of generation."""
        return {}

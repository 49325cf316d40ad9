"""The ChatGLM family: ChatGLM2-6B, ChatGLM3-6B (8K, 32K, 128K), GLM-4-9B and their chat models.

The published code of these models doesn't load with transformers 5, but transformers' own
`GlmForCausalLM` computes the same. This module has the differences: names in the configuration,
names and layout of the tensors, two methods for longer contexts (`ChatGLMConfig`), and rotary
frequencies that stay in float32 when the model is cast.

`register` makes transformers' own ``from_pretrained`` and ``save_pretrained`` read and write the
published files. Nothing is registered on import.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.cache_utils import Cache
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    WeightConverter,
    WeightRenaming,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.glm.configuration_glm import GlmConfig
from transformers.models.glm.modeling_glm import (
    GlmAttention,
    GlmDecoderLayer,
    GlmForCausalLM,
    GlmModel,
    GlmPreTrainedModel,
    GlmRMSNorm,
    GlmRotaryEmbedding,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from duoka.checkpoint.architecture import CHATGLM_NAMES, refuse_other_chatglm

from .cache_argument import takes_cache

_ROPE_THETA = 10_000.0
# The RMSNorm epsilon identifies the generation: 1e-5 in ChatGLM2 and 3, 1.5625e-7 in GLM-4.
_GLM4_EPSILON_LIMIT = 1e-6


@strict
class ChatGLMConfig(GlmConfig):
    """A configuration with ``model_type`` "chatglm", in the published or in transformers' names.

    Two models of the family extend their context by other methods than a larger rotary base, but
    no key of their files states the method. They are identified by values that fine-tuning and
    saving don't change: ``rope_ratio``, and the generation, which follows from the RMSNorm epsilon
    (1e-5 for ChatGLM2 and 3). GLM-4-9B-chat has the ratio of ChatGLM3-6B-128K, but another epsilon.

    ========================  ========  ==========  ===========================================
    model                     epsilon   rope_ratio  positions
    ========================  ========  ==========  ===========================================
    chatglm2-6b, chatglm3-6b  1e-5      1 (absent)  base 10000
    chatglm2-6b-32k           1e-5      16          positions divided by 16
    chatglm3-6b-32k           1e-5      50          base 500,000
    chatglm3-6b-128k          1e-5      500         base 5,000,000; queries scaled by position
    glm-4-9b-chat (-1m)       1.56e-7   500 (10^4)  base 5,000,000 (10^8)
    ========================  ========  ==========  ===========================================

    ``rope_parameters`` and ``query_length_scaling`` take precedence over the table if a
    configuration has them; ``save_pretrained`` always writes both.

    Parameters
    ----------
    rope_ratio : float
        The factor on the rotary base, as published.
    query_length_scaling : bool or None
        Multiply the query at position p by max(1, ln(p + 65) / ln 2048). None chooses by the table.
    """

    model_type = "chatglm"

    rope_ratio: float | int = 1.0
    query_length_scaling: bool | None = None

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Parse a configuration; with a ``vision_config`` return a `GLM4VConfig`."""
        if cls is ChatGLMConfig and config_dict.get("vision_config"):
            from .glm4v import GLM4VConfig

            return GLM4VConfig.from_dict(config_dict, **kwargs)
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs: Any) -> None:
        """Translate published names, and infer settings missing in the files."""
        refuse_other_chatglm({**vars(self), **kwargs})
        for old, new in CHATGLM_NAMES.items():
            if old in kwargs:
                setattr(self, new, kwargs.pop(old))
        # No earlier generation has a vision tower.
        has_tower = getattr(self, "vision_config", None) is not None
        is_glm4 = has_tower or self.rms_norm_eps < _GLM4_EPSILON_LIMIT
        if self.query_length_scaling is None:
            self.query_length_scaling = self.rope_ratio == 500 and not is_glm4
        stated = self.rope_parameters or kwargs.get("rope_scaling") or "rope_theta" in kwargs
        if not stated:
            self.rope_parameters = _rope_parameters(self.rope_ratio, is_glm4=is_glm4)
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]


def _rope_parameters(rope_ratio: float, *, is_glm4: bool) -> dict[str, Any]:
    """Return transformers' rotary settings for a published ratio, by the table of the class."""
    parameters: dict[str, Any] = {"rope_type": "default", "partial_rotary_factor": 0.5}
    if rope_ratio == 16 and not is_glm4:
        return {**parameters, "rope_type": "linear", "rope_theta": _ROPE_THETA, "factor": 16.0}
    return {**parameters, "rope_theta": _ROPE_THETA * rope_ratio}


class ChatGLMRotaryEmbedding(GlmRotaryEmbedding):
    """Rotary embeddings from float32 frequencies, with the query scale of ChatGLM3-6B-128K."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Return cosine and sine [batch, tokens, rotated].

        With `query_length_scaling` a query scale [batch, tokens] is the third item.
        """
        tables: tuple[Tensor, ...] = super().forward(x, position_ids)
        if self.config.query_length_scaling:
            tables += (query_length_scale(position_ids).to(x.dtype),)
        return tables

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply a function as `nn.Module` does, but keep the frequencies in float32."""
        # `half()` would also cast the frequencies; at 2,300 tokens the logits then have an error of
        # 9e-2 instead of 2e-2. `to_empty()` would leave the frequencies uninitialized. So they
        # follow changes of the device only, and are computed when they leave the meta device.
        originals = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, moved in self._buffers.items():
            exact = originals[name]
            if exact is not None and moved is not None:
                if exact.is_meta and not moved.is_meta:
                    exact = self._frequencies()
                self._buffers[name] = exact.to(moved.device)
        return self

    def _frequencies(self) -> Tensor:
        """Compute the rotary frequencies of the configuration."""
        compute = self.compute_default_rope_parameters
        if self.rope_type != "default":
            compute = ROPE_INIT_FUNCTIONS[str(self.rope_type)]
        frequencies: Tensor = compute(self.config)[0]
        return frequencies


# Attention weights become flatter with the number of keys. If attention logits grow with the
# logarithm of that number, the weights stay about as sharp as over 2,048 keys. The factor is 1 up
# to position 1,983, where p + 65 = 2,048, and ln(8256) / ln(2048) = 1.18 at position 8,191.
def query_length_scale(position_ids: Tensor) -> Tensor:
    """Return the float32 factor on the query at each position in ChatGLM3-6B-128K."""
    return ((position_ids + 65).float().log() / math.log(2048)).clamp(min=1.0)


class ChatGLMAttention(GlmAttention):
    """`GlmAttention` that scales queries by the third of the position embeddings, if present."""

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, ...] | None = None,
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention; see `GlmAttention`.

        `position_embeddings` are cosine, sine and optionally the query scale [batch, tokens].
        """
        assert position_embeddings is not None
        assert self.layer_idx is not None
        cos, sin, *scales = position_embeddings
        leading = hidden_states.shape[:-1]
        query, key, value = (
            project(hidden_states).view(*leading, -1, self.head_dim).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )  # [batch, heads or groups, tokens, head_dim]
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        for scale in scales:
            query = query * scale[:, None, :, None]
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        mixed, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )  # [batch, tokens, heads, head_dim]
        return self.o_proj(mixed.reshape(*leading, -1)), weights


class ChatGLMDecoderLayer(GlmDecoderLayer):
    """`GlmDecoderLayer` with `ChatGLMAttention`."""

    def __init__(self, config: ChatGLMConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        if config.query_length_scaling:
            self.self_attn = ChatGLMAttention(config, layer_idx)


class ChatGLMPreTrainedModel(GlmPreTrainedModel):
    """Base of both model classes, with class attributes that transformers reads."""

    config: ChatGLMConfig
    config_class = ChatGLMConfig
    _no_split_modules = ["ChatGLMDecoderLayer"]  # noqa: RUF012 (transformers' own form)
    # Published files have this buffer, although it can be computed from the configuration.
    _keys_to_ignore_on_load_unexpected = [r"rotary_pos_emb\.inv_freq"]  # noqa: RUF012
    published_buffers = ("transformer.rotary_pos_emb.inv_freq",)


class ChatGLMModel(ChatGLMPreTrainedModel, GlmModel):
    """The decoder without its head."""

    def __init__(self, config: ChatGLMConfig) -> None:
        # GlmModel's constructor would build layers of its own class first.
        GlmPreTrainedModel.__init__(self, config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        # Without padding_idx, which would freeze a row; the published models train all rows.
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            ChatGLMDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = GlmRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = ChatGLMRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()  # type: ignore[no-untyped-call]

    forward = takes_cache(GlmModel.forward)


class ChatGLMForCausalLM(ChatGLMPreTrainedModel, GlmForCausalLM):
    """The decoder with its language-model head."""

    decoder_class: type[ChatGLMModel] = ChatGLMModel

    def __init__(self, config: ChatGLMConfig) -> None:
        GlmPreTrainedModel.__init__(self, config)
        self.model = self.decoder_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    forward = takes_cache(GlmForCausalLM.forward)


# ChatGLM3-6B has 32 heads, 2 groups and a head_dim of 128, so query_key_value [4608, 4096] becomes
# q_proj, rows 0:4096; k_proj, rows 4096:4352; and v_proj, rows 4352:4608. A bias is split likewise.
class SplitQueryKeyValue(ConversionOps):
    """Splits the rows of a fused tensor, [heads, groups, groups] x head_dim, by projection."""

    @torch.no_grad()
    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Tensor]:
        """Split the fused tensor into a tensor for each target, in their order."""
        (tensors,) = input_dict.values()
        fused = tensors[0] if isinstance(tensors, list) else tensors
        config = kwargs["config"]
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        rows = [count * config.head_dim for count in (heads, groups, groups)]
        parts = torch.split(fused, rows, dim=0)
        return {name: part.contiguous() for name, part in zip(target_patterns, parts, strict=True)}

    @property
    def reverse_op(self) -> ConversionOps:
        """The inverse, for ``save_pretrained``."""
        return Concatenate(dim=0)


RENAMED = {
    "transformer.embedding.word_embeddings": "model.embed_tokens",
    "transformer.output_layer": "lm_head",
    "transformer.encoder.final_layernorm": "model.norm",
    "transformer.encoder.layers": "model.layers",
    "transformer.vision": "model.vision",
    "self_attention.dense": "self_attn.o_proj",
    "mlp.dense_h_to_4h": "mlp.gate_up_proj",
    "mlp.dense_4h_to_h": "mlp.down_proj",
}
"""Parts of published names → names in `GlmForCausalLM`, except the fused projection."""


def conversions() -> list[WeightRenaming | WeightConverter]:
    """Return the conversions from published names and layouts to `GlmForCausalLM`'s.

    ``mlp.dense_h_to_4h`` has the rows of the gate before those of the up projection, like
    ``gate_up_proj``, and rotary pairs are interleaved in both forms. So only names change, except
    for the fused query, key and value.
    """
    fused = WeightConverter(
        "self_attention.query_key_value",
        ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        [SplitQueryKeyValue()],
    )
    return [*(WeightRenaming(old, new) for old, new in RENAMED.items()), fused]


def register() -> None:
    """Register the family with transformers' Auto classes and loaders. Idempotent."""
    AutoConfig.register("chatglm", ChatGLMConfig, exist_ok=True)
    AutoModel.register(ChatGLMConfig, ChatGLMModel, exist_ok=True)
    AutoModelForCausalLM.register(ChatGLMConfig, ChatGLMForCausalLM, exist_ok=True)
    register_checkpoint_conversion_mapping("chatglm", conversions(), overwrite=True)

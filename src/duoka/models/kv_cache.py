"""KV caches: the keys and values of earlier tokens, on the device of their layer.

There are two kinds (`Workload.cache`), beside paged ones (`runtime.call.paged_attention`).
"dynamic" is transformers' `DynamicCache`: it grows by a copy with each step. "int8" grows too, and
keeps each token's keys and values as 8-bit integers with a scale for each head.

"int8" is duoka's own. Of the backends of transformers' `QuantizedCache`, quanto's has no 8 bit; fp8
takes a single scale for a whole layer from the first tokens, which later tokens may overflow; hqq's
8 bit works, but can't be added to: every 128 tokens a whole layer is dequantized to float32 and
rounded again.

It knows nothing of devices: a layer's cache is made where its first keys come from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicLayer

from duoka.errors import UsageError
from duoka.forecast.workload import Cache

_MOST = 127
"""The largest 8-bit integer."""


def new_cache(model: Any, kind: Cache = "dynamic") -> Any:
    """Make the cache for a run of a model; None for models that make their own kind."""
    # Remote code may lack the method; `generate` needs it.
    takes_ours = getattr(model, "_supports_default_dynamic_cache", lambda: True)
    if not takes_ours():
        _refuse(model, kind, "it creates its own kind of cache")
        return None
    decoder = model.config.get_text_config(decoder=True)
    cache: Any = DynamicCache(config=decoder)
    if kind == "int8" and not _make_int8(cache):
        _refuse(model, kind, "none of its layers stores the keys and values of all tokens")
    if not model.config.is_encoder_decoder:
        return cache
    return EncoderDecoderCache(cache, DynamicCache(config=decoder))


def layer_tensors(cache: Any) -> list[dict[str, Any]]:
    """Return the attributes of each layer of a cache, of both parts for an encoder and decoder."""
    names = ("self_attention_cache", "cross_attention_cache")
    parts = (cache, *(getattr(cache, name, None) for name in names))
    return [vars(layer) for part in parts for layer in getattr(part, "layers", None) or ()]


def lengthen(cache: Any, tokens: int) -> bool:
    """Append tokens of any content to a cache; return False for another layout."""
    layers = getattr(cache, "layers", [])
    if not layers or any(type(layer) not in _STATES for layer in layers):
        return False
    for layer in layers:
        for names in _STATES[type(layer)] if layer.is_initialized else ():
            vars(layer).update({name: _longer(getattr(layer, name), tokens) for name in names})
    return True


# Layouts of such caches differ, so the dimension of tokens is the one of length `past`. In a state
# [1, 2, 300, 128] with 300 tokens that is dimension 2; with 2 tokens it would be ambiguous.
def longer(layers: Any, past: int, tokens: int) -> Any:
    """Append tokens to a cache of `past` tokens in plain tuples; None if it is ambiguous."""
    if not isinstance(layers, tuple) or not all(isinstance(layer, tuple) for layer in layers):
        return None
    if any(list(state.shape).count(past) != 1 for layer in layers for state in layer):
        return None

    def extended(state: Tensor) -> Tensor:
        at = list(state.shape).index(past)
        added = state.new_zeros(*state.shape[:at], tokens, *state.shape[at + 1 :])
        return torch.cat((state, added), at)

    return tuple(tuple(extended(state) for state in layer) for layer in layers)


class Int8Layer(DynamicLayer):
    """Keys and values of all tokens as 8-bit integers, with a scale for each token and head.

    New keys and values are rounded once, when they come. The first step attends to its exact keys
    and values; later steps to a copy of all in the model's type, while the layer computes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Add tokens, and return the keys and values of all: [batch, heads, tokens, head_dim].

        `kwargs` are for continuous batching in transformers 5.24.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.key_scales, keys = _extended(self.keys, self.key_scales, key_states)
        self.values, self.value_scales, values = _extended(
            self.values, self.value_scales, value_states
        )
        return keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note the type and the device; the first tokens allocate memory."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def reset(self) -> None:
        """Forget all tokens."""
        self.keys = self.values = self.key_scales = self.value_scales = None
        self.is_initialized = False

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return 0 if self.keys is None else int(self.keys.shape[-2])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens."""
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        self._change_scales(lambda scales: scales[..., :length, :])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take other sequences of the batch, as beam search does."""
        super().reorder_cache(beam_idx)
        self._change_scales(lambda scales: scales.index_select(0, beam_idx.to(scales.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        super().batch_repeat_interleave(repeats)
        self._change_scales(lambda scales: scales.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences of the batch."""
        super().batch_select_indices(indices)
        self._change_scales(lambda scales: scales[indices, ...])

    def _change_scales(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.key_scales is not None and self.value_scales is not None:
            self.key_scales, self.value_scales = change(self.key_scales), change(self.value_scales)


def _extended(
    cached: Tensor | None, scales: Tensor | None, states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Append states; return integers, scales, and all states in their own type."""
    new, new_scales = round_to_int8(states)
    if cached is None or scales is None:
        return new, new_scales, states
    # Scales first, as in the first step, so that frees come in the order of allocations.
    scales = torch.cat([scales, new_scales], dim=-2)
    cached = torch.cat([cached, new], dim=-2)
    return cached, scales, cached * scales


# Symmetric quantization, one scale for each token and head: [0.5, -2.0, 1.0] has the scale 2/127
# and the integers [32, -127, 64]; the largest error is half a scale. The smallest normal number is
# the least scale, so that a row of zeros isn't divided by zero. With a head_dim of 128 a key takes
# 128 + 2 bytes instead of 256 in 16 bit, and so does a value.
def round_to_int8(states: Tensor) -> tuple[Tensor, Tensor]:
    """Round […, head_dim] to 8-bit integers; return them with their scales, […, 1]."""
    scales = states.abs().amax(dim=-1, keepdim=True) / _MOST
    scales = scales.clamp_(min=torch.finfo(states.dtype).tiny)
    # A scale is rounded too, so that the largest may come out a little above the range.
    return (states / scales).round_().clamp_(-_MOST, _MOST).to(torch.int8), scales


def _make_int8(cache: Any) -> bool:
    """Replace plain layers by layers in 8 bit."""
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = Int8Layer
        return True
    # Other layers (a window, linear attention, an index) keep their type.
    cache.layers = [Int8Layer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return any(isinstance(layer, Int8Layer) for layer in cache.layers)


def _refuse(model: Any, kind: Cache, why: str) -> None:
    if kind != "dynamic":
        raise UsageError(
            f"{type(model).__name__} can't run with a cache {kind!r}: {why}",
            hint='omit the cache, or use "dynamic"',
        )


# By type of layer: names of its tensors, those together that are allocated before any is freed.
_STATES: dict[type, tuple[tuple[str, ...], ...]] = {
    DynamicLayer: (("keys", "values"),),
    Int8Layer: (("keys", "values"), ("key_scales",), ("value_scales",)),
}


def _longer(states: Tensor, tokens: int) -> Tensor:
    """Append zeros for more tokens to [batch, heads, tokens, head_dim]."""
    batch, heads, length, width = states.shape
    return states.new_zeros((batch, heads, length + tokens, width))

"""KV caches: the keys and values of earlier tokens, on the device of their layer.

There are two kinds (`Workload.cache`), apart from paged caches (`runtime.call.paged_cache`).
"dynamic" is transformers' `DynamicCache`: each step copies it into a longer one. "int8" grows in
the same way, and stores each token's keys and values as 8-bit integers with a scale for each head.

"int8" is duoka's own implementation, because the backends of transformers' `QuantizedCache` don't
suffice: quanto has no 8 bit. fp8 has a single scale for a whole layer, from the first tokens, which
later tokens may overflow. hqq can't append: every 128 tokens it dequantizes a whole layer to
float32 and rounds it again.

This module doesn't choose devices: a layer's cache is on the device of its first keys.
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
    """Create the cache for a run of a model; return None for models with caches of their own.

    Raises UsageError if the model can't run with a cache other than "dynamic".
    """
    # Remote code may lack the method, which `generate` calls.
    supports_dynamic = getattr(model, "_supports_default_dynamic_cache", lambda: True)
    if not supports_dynamic():
        _refuse_kind(model, kind, "it creates its own kind of cache")
        return None
    decoder = model.config.get_text_config(decoder=True)
    cache: Any = DynamicCache(config=decoder)
    if kind == "int8" and not _make_int8(cache):
        _refuse_kind(model, kind, "none of its layers stores the keys and values of all tokens")
    if not model.config.is_encoder_decoder:
        return cache
    return EncoderDecoderCache(cache, DynamicCache(config=decoder))


def layer_tensors(cache: Any) -> list[dict[str, Any]]:
    """Return the attributes of each layer of a cache, or of both parts of an encoder-decoder's."""
    names = ("self_attention_cache", "cross_attention_cache")
    parts = (cache, *(getattr(cache, name, None) for name in names))
    return [vars(layer) for part in parts for layer in getattr(part, "layers", None) or ()]


def lengthen(cache: Any, tokens: int) -> bool:
    """Lengthen a cache by `tokens` tokens without computing them; all contents become zeros.

    Returns False, with nothing changed, for a cache with layers of other types.
    """
    layers = getattr(cache, "layers", [])
    if not layers or any(type(layer) not in _STATES for layer in layers):
        return False
    for layer in layers:
        for names in _STATES[type(layer)] if layer.is_initialized else ():
            vars(layer).update({name: _make_longer(getattr(layer, name), tokens) for name in names})
    return True


# Layouts of such caches differ, so the dimension of tokens is found by its length `past`. In a
# state [1, 2, 300, 128] with 300 tokens that is dimension 2; with 2 tokens it would be ambiguous.
def longer(layers: Any, past: int, tokens: int) -> Any:
    """Append `tokens` tokens of zeros to a cache of plain tuples that has `past` tokens.

    Returns None if `layers` are no tuples, or the dimension of tokens is ambiguous.
    """
    if not isinstance(layers, tuple) or not all(isinstance(layer, tuple) for layer in layers):
        return None
    if any(list(state.shape).count(past) != 1 for layer in layers for state in layer):
        return None

    def append_zeros(state: Tensor) -> Tensor:
        at = list(state.shape).index(past)
        added = state.new_zeros(*state.shape[:at], tokens, *state.shape[at + 1 :])
        return torch.cat((state, added), at)

    return tuple(tuple(append_zeros(state) for state in layer) for layer in layers)


class Int8Layer(DynamicLayer):
    """Keys and values of all tokens as 8-bit integers, with a scale for each token and head.

    Keys and values are rounded once, when they are added. The first step attends to its exact keys
    and values. Later steps attend to a dequantized copy in the model's dtype, which exists while
    the layer computes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key_scales: Tensor | None = None
        self.value_scales: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *, kwargs: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Append tokens; return the keys and values of all tokens [batch, heads, tokens, head_dim].

        `kwargs` are passed by transformers 5.24 for continuous batching, and ignored.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.key_scales, keys = _append_states(self.keys, self.key_scales, key_states)
        self.values, self.value_scales, values = _append_states(
            self.values, self.value_scales, value_states
        )
        return keys, values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Set dtype and device; memory is allocated by the first `update`."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def reset(self) -> None:
        """Remove all tokens."""
        self.keys = self.values = self.key_scales = self.value_scales = None
        self.is_initialized = False

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return 0 if self.keys is None else int(self.keys.shape[-2])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; see `DynamicLayer`."""
        super().crop(tokens_to_remove)
        length = self.get_seq_length()
        self._change_scales(lambda scales: scales[..., :length, :])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Select sequences of the batch in the order of `beam_idx`, for beam search."""
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
        """Apply a function to the scales of keys and of values, if there are tokens."""
        if self.key_scales is not None and self.value_scales is not None:
            self.key_scales, self.value_scales = change(self.key_scales), change(self.value_scales)


def _append_states(
    cached: Tensor | None, scales: Tensor | None, states: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Append states, rounded to int8; return all integers, all scales, and all states dequantized.

    The first states are returned as they are.
    """
    new, new_scales = round_to_int8(states)
    if cached is None or scales is None:
        return new, new_scales, states
    # Scales first, as in the first step, so that memory is freed in the order of allocation.
    scales = torch.cat([scales, new_scales], dim=-2)
    cached = torch.cat([cached, new], dim=-2)
    return cached, scales, cached * scales


# Symmetric quantization with one scale for each token and head: [0.5, -2.0, 1.0] has the scale
# 2/127 and the integers [32, -127, 64]; the error is at most half a scale. Scales are at least the
# smallest normal number, so that a row of zeros isn't divided by zero. With a head_dim of 128 and
# 16-bit scales, a key or a value takes 128 + 2 bytes instead of 256.
def round_to_int8(states: Tensor) -> tuple[Tensor, Tensor]:
    """Round states […, head_dim] to 8-bit integers; return the integers and their scales […, 1]."""
    scales = states.abs().amax(dim=-1, keepdim=True) / _MOST
    scales = scales.clamp_(min=torch.finfo(states.dtype).tiny)
    # Scales are rounded to the dtype, so the largest quotient may slightly exceed 127.
    return (states / scales).round_().clamp_(-_MOST, _MOST).to(torch.int8), scales


def _make_int8(cache: Any) -> bool:
    """Replace `DynamicLayer`s of a cache by `Int8Layer`s; return False if there are none."""
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = Int8Layer
        return True
    # Layers of other types (sliding window, linear attention, an index) are kept.
    cache.layers = [Int8Layer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return any(isinstance(layer, Int8Layer) for layer in cache.layers)


def _refuse_kind(model: Any, kind: Cache, why: str) -> None:
    """Raise UsageError for every kind of cache except "dynamic"."""
    if kind != "dynamic":
        raise UsageError(
            f"{type(model).__name__} can't run with a cache {kind!r}: {why}",
            hint='omit the cache, or use "dynamic"',
        )


# By type of layer: the names of its tensors, in groups. `lengthen` allocates all new tensors of a
# group before it frees the old ones.
_STATES: dict[type, tuple[tuple[str, ...], ...]] = {
    DynamicLayer: (("keys", "values"),),
    Int8Layer: (("keys", "values"), ("key_scales",), ("value_scales",)),
}


def _make_longer(states: Tensor, tokens: int) -> Tensor:
    """Return zeros in the shape of states [batch, heads, length, head_dim] with more tokens."""
    batch, heads, length, width = states.shape
    return states.new_zeros((batch, heads, length + tokens, width))

"""The dynamic cache with its interface of transformers 4.36 to 5.0."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache

LayerStates = tuple[tuple[Tensor, Tensor], ...]
"""Keys and values of each layer: the form of caches before 4.36, and between calls until 5.0."""


class LegacyCache(DynamicCache):
    """A cache with tuple conversion, indexing by layer, and the length methods of 4.x."""

    @classmethod
    def from_legacy_cache(cls, past_key_values: LayerStates | None = None) -> LegacyCache:
        """Create a cache from the tuples of an earlier call."""
        cache = cls()
        for layer, (keys, values) in enumerate(past_key_values or ()):
            cache.update(keys, values, layer)
        return cache

    def to_legacy_cache(self) -> LayerStates:
        """Return the keys and values of each layer as tuples, for the next call."""
        return tuple(self[layer] for layer in range(len(self)))

    def __getitem__(self, layer: int) -> tuple[Tensor, Tensor]:
        states: Any = self.layers[layer]
        return states.keys, states.values

    def __iter__(self) -> Any:
        return iter(self.to_legacy_cache())

    @property
    def key_cache(self) -> list[Tensor]:
        """The keys by layer."""
        return [keys for keys, _ in self.to_legacy_cache()]

    @property
    def value_cache(self) -> list[Tensor]:
        """The values by layer."""
        return [values for _, values in self.to_legacy_cache()]

    @property
    def seen_tokens(self) -> int:
        """The number of tokens."""
        return int(self.get_seq_length())

    _seen_tokens = seen_tokens

    def get_usable_length(self, new_seq_length: int, layer_idx: int = 0) -> int:
        """Return the number of tokens; a cache without a limit keeps all."""
        return int(self.get_seq_length(layer_idx))

    def get_max_length(self, *_: Any) -> Any:
        """Return None, which means no limit; 5.0 returns -1."""

    get_max_cache_shape = get_max_length

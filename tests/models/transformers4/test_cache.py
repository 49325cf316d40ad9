"""The dynamic cache as 4.36 had it."""

from __future__ import annotations

import torch

from duoka.models.transformers4.cache import LegacyCache


def test_there_and_back() -> None:
    layers = tuple((torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)) for _ in range(3))
    cache = LegacyCache.from_legacy_cache(layers)
    assert (len(cache), cache.seen_tokens, cache.get_usable_length(1)) == (3, 5, 5)
    assert cache.get_max_length() is None
    for (keys, values), (old_keys, old_values) in zip(cache, layers, strict=True):
        assert torch.equal(keys, old_keys)
        assert torch.equal(values, old_values)
    assert torch.equal(cache[1][0], layers[1][0])
    assert torch.equal(cache.key_cache[2], layers[2][0])
    assert torch.equal(cache.value_cache[2], layers[2][1])
    assert len(cache.to_legacy_cache()) == 3


def test_an_empty_one() -> None:
    assert LegacyCache.from_legacy_cache(None).seen_tokens == 0

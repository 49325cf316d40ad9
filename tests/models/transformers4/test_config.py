"""What transformers 4 gave to each configuration."""

from __future__ import annotations

import pytest

from duoka.models.transformers4.config import LegacyConfig


class SmallConfig(LegacyConfig):
    def __init__(self, num_layers: int = 3, padded_vocab_size: int = 10, **kwargs: object) -> None:
        self.num_layers = num_layers
        self.padded_vocab_size = padded_vocab_size
        super().__init__(**kwargs)


def test_defaults_that_moved_are_there() -> None:
    config = SmallConfig()
    assert (config.max_length, config.is_decoder, config.pruned_heads) == (20, False, {})
    assert config.rope_scaling is None
    assert config._get_generation_parameters() == {}


def test_what_it_says_itself_counts() -> None:
    assert SmallConfig(use_cache=False, rope_scaling={"type": "linear"}).rope_scaling == {
        "type": "linear"
    }
    assert SmallConfig(use_cache=False).use_cache is False


def test_transformers_5_finds_it_by_its_names() -> None:
    config = SmallConfig()
    assert (config.num_hidden_layers, config.vocab_size) == (3, 10)
    config.num_hidden_layers = 2
    assert (config.num_hidden_layers, config.num_layers) == (2, 3)


def test_names_that_say_the_same_may_differ() -> None:
    config = SmallConfig()
    config.seq_length = 8
    config.max_position_embeddings = 32
    assert (config.seq_length, config.max_position_embeddings) == (8, 32)


def test_other_attributes_are_missing() -> None:
    with pytest.raises(AttributeError, match="'SmallConfig' object has no attribute 'nonsense'"):
        SmallConfig().nonsense  # noqa: B018

"""A tiny ChatGLM3 with random weights, as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_random

from duoka.tools.demo.checkpoint import CONFIG

TINY = {
    **CONFIG,
    "hidden_size": 64,
    "padded_vocab_size": 1536,
    "ffn_hidden_size": 96,
    "num_layers": 3,
    "num_attention_heads": 4,
    "kv_channels": 16,
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("tiny-chatglm3"), TINY, seed=3)

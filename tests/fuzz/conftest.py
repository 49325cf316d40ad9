"""A checkpoint that commands can be run on."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_random

from duoka.tools.demo.checkpoint import CONFIG

TINY = {**CONFIG, "hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 3, "kv_channels": 16}
TINY |= {"num_attention_heads": 4, "padded_vocab_size": 1536}


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(tmp_path_factory.mktemp("tiny-chatglm3"), TINY, seed=3)

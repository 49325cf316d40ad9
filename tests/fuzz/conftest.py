"""A checkpoint that commands can be run on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from duoka.demo.checkpoint import CONFIG, fresh_model, write_frame, write_weights

TINY = {**CONFIG, "hidden_size": 64, "ffn_hidden_size": 96, "num_layers": 3, "kv_channels": 16}
TINY["num_attention_heads"] = 4


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-chatglm3")
    write_frame(directory, TINY)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        write_weights(directory, TINY, fresh_model(TINY))
    return directory

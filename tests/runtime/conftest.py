"""A tiny ChatGLM3 with random weights, as a checkpoint and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import duoka
from duoka.checkpoint import Checkpoint
from duoka.demo.checkpoint import CONFIG, fresh_model, write_frame, write_weights
from duoka.runtime import Generator
from duoka.workload import Workload

TINY = {
    **CONFIG,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_layers": 3,
    "num_attention_heads": 4,
    "kv_channels": 16,
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-chatglm3")
    write_frame(directory, TINY)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        write_weights(directory, TINY, fresh_model(TINY))
    return directory


# Not for the session: a test elsewhere may configure other virtual GPUs for this process.
@pytest.fixture(scope="module")
def generator(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator:
    """On two virtual GPUs, planned for 3 prompts of 64 tokens and 32 new ones."""
    workload = Workload(batch=3, prompt_tokens=64, new_tokens=32, prefill_chunk_tokens=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUOKA_CACHE", str(tmp_path_factory.mktemp("cache")))
        plan = duoka.plan(tiny, "virtual:2x64MiB", workload, use_all=True)
    return Generator.of(duoka.load(plan), Checkpoint.open(tiny), plan.workload)

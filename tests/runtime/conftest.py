"""A tiny ChatGLM3 with random weights, as a checkpoint and loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import write_random

import duoka
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.forecast.workload import Workload
from duoka.runtime import Generator
from duoka.tools.demo.checkpoint import CONFIG

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
    return write_random(tmp_path_factory.mktemp("tiny-chatglm3"), TINY, seed=3)


# Not for the session: a test elsewhere may configure other virtual GPUs for this process.
@pytest.fixture(scope="module")
def generator(tiny: Path) -> Generator:
    """On two virtual GPUs, planned for 3 prompts of 64 tokens and 32 new ones."""
    workload = Workload(batch=3, prompt_tokens=64, new_tokens=32, prefill_chunk_tokens=None)
    plan = duoka.plan(tiny, "virtual:2x64MiB", workload, use_all=True)
    return Generator.of(duoka.load(plan), Checkpoint.open(tiny), plan.workload)

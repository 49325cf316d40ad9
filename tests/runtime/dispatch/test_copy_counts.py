"""How often a spread model copies between GPUs: a count that stands for the time it takes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import Counts
from transformers import LlamaConfig, LlamaForCausalLM

import duoka
from duoka import virtual
from duoka.models.cache_argument import cache_name

HIDDEN, HEAD, VOCABULARY = 64, 16, 320
WORK = duoka.Workload(prompt_tokens=64, new_tokens=32)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=6,
        num_attention_heads=HIDDEN // HEAD, num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("model") / "llama"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def expected(num_gpus: int, tokens: int) -> Counter[tuple[str, str, tuple[int, ...]]]:
    """One hidden state over each boundary; once to each GPU what the first one makes for all.

    That is cosines and sines of the positions, and the positions themselves. The logits come back.
    """
    copies: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
    for gpu in range(1, num_gpus):
        copies[f"vgpu:{gpu - 1}", f"vgpu:{gpu}", (1, tokens, HIDDEN)] += 1
        copies["vgpu:0", f"vgpu:{gpu}", (1, tokens, HEAD)] += 2
        copies["vgpu:0", f"vgpu:{gpu}", (1, tokens)] += 1
    copies[f"vgpu:{num_gpus - 1}", "vgpu:0", (1, tokens, VOCABULARY)] += 1
    return copies


@pytest.mark.parametrize("num_gpus", [2, 3])
def test_each_step_copies_one_hidden_state_over_each_boundary(llama: Path, num_gpus: int) -> None:
    model: Any = duoka.load(duoka.plan(llama, f"virtual:{num_gpus}x64MiB", WORK, use_all=True))
    ids, cache, name = torch.arange(10, 20)[None].to(model.device), None, cache_name(model)
    with torch.no_grad():
        for tokens in (10, 1, 1, 1):
            counts = Counts()
            with virtual.observe(counts):
                cache = model(ids[:, :tokens], use_cache=True, **{name: cache})[name]
            assert counts.between_gpus == expected(num_gpus, tokens)
            # Layers make their caches in the first step, of nothing.
            assert not set(counts.copies) - set(counts.between_gpus)

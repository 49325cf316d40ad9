"""Packed rows; that all families keep their samples apart is in `matrix.batches`."""

from __future__ import annotations

from typing import Any

import families
import numpy as np
import pytest
import torch
from chatglm_files import config
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix.batches import check_packing
from transformers import LlamaConfig, Qwen3Config

from duoka.errors import UsageError
from duoka.models import build
from duoka.tuner.data import refuse_packing
from duoka.tuner.data.packing import pack


@settings(max_examples=examples(100))
@given(st.lists(st.integers(1, 20), max_size=30), st.integers(20, 40), st.randoms())
def test_packs_have_every_sample_once(lengths: list[int], most: int, random: Any) -> None:
    order = list(range(len(lengths)))
    random.shuffle(order)
    packs = pack(np.array(lengths, np.int64), order, most)
    assert sorted(sample for samples in packs for sample in samples) == list(range(len(lengths)))
    totals = [sum(lengths[sample] for sample in samples) for samples in packs]
    assert all(total <= most for total in totals)
    # No pack is there for nothing: no two of them fit into one.
    assert all(a + b > most for at, a in enumerate(totals) for b in totals[:at])


def test_packs_are_the_fullest_ones() -> None:
    lengths = np.array([7, 5, 5, 3, 3, 3, 4], np.int64)
    assert pack(lengths, range(7), 10) == [[0, 3], [1, 2], [6, 4, 5]]
    assert pack(lengths, [*reversed(range(7))], 10) == [[0, 5], [2, 1], [6, 4, 3]]


@pytest.mark.parametrize("name", ["chatglm3-6b", "glm-4-9b-chat"])
def test_chatglm_keeps_samples_apart(name: str) -> None:
    published = {
        **config(name),
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "kv_channels": 8,
        "padded_vocab_size": 99,
    }
    model = build(published, dtype=torch.float32)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    refuse_packing(model.config)
    check_packing(model.eval())


def test_who_is_refused() -> None:
    refuse_packing(LlamaConfig())
    for name in ("mamba", "bloom", "qwen3_next", "jamba"):
        with pytest.raises(UsageError, match=f"{name} isn't known to separate"):
            refuse_packing(families.families([name])[name][1])
    with pytest.raises(UsageError, match="qwen3"):
        refuse_packing(Qwen3Config(num_hidden_layers=1, layer_types=["linear_attention"]))

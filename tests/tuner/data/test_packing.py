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
from transformers import LlamaConfig, Qwen3Config

from duoka.errors import UsageError
from duoka.models import build
from duoka.tuner.data import Batches, TrainingMicroBatch, refuse_packing
from duoka.tuner.data.packing import FAMILIES, pack

LENGTHS = (6, 9, 5)


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


def assert_apart(model: Any, micro_batch: TrainingMicroBatch) -> None:
    """A packed row's logits are those of its samples alone."""
    batch = micro_batch.tensors()
    assert len(micro_batch.rows[0]) == len(LENGTHS)
    with torch.no_grad():
        inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
        packed = model(**inputs, use_cache=False).logits
        start = 0
        for sample in micro_batch.rows[0]:
            ids, _ = micro_batch.dataset.tokens(sample)
            alone = model(torch.tensor(ids)[None].long(), use_cache=False).logits
            torch.testing.assert_close(
                packed[:, start : start + len(ids)], alone, rtol=0, atol=1e-4
            )
            start += len(ids)


@pytest.mark.parametrize("name", families.sample(sorted(FAMILIES & set(families.causal_names()))))
def test_samples_are_kept_apart(name: str, make_dataset: Any) -> None:
    data = make_dataset(LENGTHS, seq_length=24)
    assert_apart(families.build(name), Batches(data, batch=1, packing=True)[0].micro_batches[0])


@pytest.mark.parametrize("name", ["chatglm3-6b", "glm-4-9b-chat"])
def test_chatglm_keeps_samples_apart(name: str, make_dataset: Any) -> None:
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
    data = make_dataset(LENGTHS, seq_length=24)
    refuse_packing(model.config)
    assert_apart(model.eval(), Batches(data, batch=1, packing=True)[0].micro_batches[0])


def test_who_is_refused() -> None:
    refuse_packing(LlamaConfig())
    for name in ("mamba", "bloom", "qwen3_next", "jamba"):
        with pytest.raises(UsageError, match=f"{name} isn't known to keep"):
            refuse_packing(families.families([name])[name][1])
    with pytest.raises(UsageError, match="qwen3"):
        refuse_packing(Qwen3Config(num_hidden_layers=1, layer_types=["linear_attention"]))

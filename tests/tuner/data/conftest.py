"""A chat format whose tokens are bytes, and datasets of any lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from tuning import make_tokenizer

from duoka.models.text.prompts import ChatFormat, chat_format
from duoka.tuner.data import Dataset

MakeDataset = Callable[..., Dataset]


@pytest.fixture
def chat() -> ChatFormat:
    return chat_format(make_tokenizer(), {"model_type": "llama"})


@pytest.fixture(scope="session")
def make_dataset() -> MakeDataset:
    """Samples of so many tokens, of whose tokens about half are trained, as `read_dataset` does."""

    def make(lengths: Sequence[int], seq_length: int = 32, vocabulary: int = 90) -> Dataset:
        ends = np.cumsum(np.array(lengths, np.int64))
        generator = np.random.default_rng(0)
        is_trained = generator.random(ends[-1]) < 0.5
        is_trained[ends - 1] = True
        is_trained[ends - np.array(lengths)] = False
        return Dataset(
            ids=generator.integers(3, vocabulary, ends[-1]).astype(np.int32),
            is_trained=is_trained,
            ends=ends,
            file_numbers=np.zeros(len(ends), np.int32),
            lines=np.arange(1, len(ends) + 1),
            files=("a.jsonl",),
            seq_length=seq_length,
        )

    return make

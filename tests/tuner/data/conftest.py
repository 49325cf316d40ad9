"""A chat format whose tokens are bytes, and datasets of any lengths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from trainers import make_dataset
from tuning import make_tokenizer

from duoka.models.text.prompts import ChatFormat, chat_format
from duoka.tuner.data import Dataset

MakeDataset = Callable[..., Dataset]


@pytest.fixture
def chat() -> ChatFormat:
    return chat_format(make_tokenizer(), {"model_type": "llama"})


@pytest.fixture(name="make_dataset", scope="session")
def dataset_maker() -> MakeDataset:
    """See `trainers.make_dataset`."""
    return make_dataset

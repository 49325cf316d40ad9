"""Reference models: what the original code computes, in the original file format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Reference:
    directory: Path
    config: dict[str, Any]
    weights: dict[str, Tensor]
    values: dict[str, Tensor]
    numbers: dict[str, Any]


@pytest.fixture(params=["chatglm3-6b", "chatglm3-6b-128k", "glm-4-9b"])
def reference(request: pytest.FixtureRequest, published_data: Path) -> Reference:
    directory = published_data / "reference" / f"{request.param}-tiny"
    return Reference(
        directory=directory,
        config=json.loads((directory / "config.json").read_text()),
        weights=load_file(directory / "model.safetensors"),
        values=load_file(directory / "reference.safetensors"),
        numbers=json.loads((directory / "reference.json").read_text()),
    )


@pytest.fixture
def template_tokenizer() -> PreTrainedTokenizerBase:
    """A byte-level tokenizer with a chat template of the common kind."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={letter: n for n, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        extra_special_tokens=["<|im_start|>"],
        chat_template=template,
    )

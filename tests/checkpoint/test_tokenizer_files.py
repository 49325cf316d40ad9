"""What is told of a tokenizer and of texts before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.tokenizer_files import refuse_prompts
from duoka.errors import CheckpointError, UsageError
from duoka.tools.demo.checkpoint import CONFIG, write_frame

LLAMA = {"model_type": "llama", "hidden_size": 64, "vocab_size": 3}


@pytest.fixture
def chatglm(tmp_path: Path) -> Path:
    write_frame(tmp_path / "chatglm", CONFIG)
    return tmp_path / "chatglm"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A tokenizer of four words for a model that knows three."""
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "d": 3}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    directory = tmp_path / "llama"
    directory.mkdir()
    words.save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return directory


def refused(directory: Path, kind: type[Exception], told: str, *texts: str, most: int = 8) -> None:
    with pytest.raises(kind, match=told) as caught:
        refuse_prompts(Checkpoint.open(directory), texts, most)
    assert getattr(caught.value, "hint", None)


def test_what_can_be_read_is(chatglm: Path, llama: Path) -> None:
    for directory in (chatglm, llama):
        refuse_prompts(Checkpoint.open(directory))
        refuse_prompts(Checkpoint.open(directory), ["a b c"], 8)


def test_texts_that_are_too_long(chatglm: Path, llama: Path) -> None:
    refused(chatglm, UsageError, "tokens of prompt; the plan has memory for 8", "好 " * 9)
    refused(llama, UsageError, "9 tokens of prompt; the plan has memory for 8", "a", "b " * 9)
    refuse_prompts(Checkpoint.open(llama), ["b      " * 8], 8)


def test_tokens_beyond_the_embedding(chatglm: Path, llama: Path) -> None:
    refused(llama, CheckpointError, "has a token 3, and the model's embedding has 3 rows", "a d")
    (chatglm / "config.json").write_text(json.dumps({**CONFIG, "padded_vocab_size": 1000}))
    refused(chatglm, CheckpointError, "the model's embedding has 1000 rows, 0 to 999")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("tokenizer_config.json", "{", "is not valid JSON"),
        ("special_tokens_map.json", "[]", "holds a JSON list"),
        ("tokenizer.json", "{}", "it is damaged, or for other versions"),
        ("tokenizer.json", "{", "it is damaged, or for other versions"),
    ],
)
def test_damaged_files(name: str, content: str, told: str, llama: Path) -> None:
    (llama / name).write_text(content)
    refused(llama, CheckpointError, told)


def test_damaged_vocabularies(chatglm: Path) -> None:
    whole = (chatglm / "tokenizer.model").read_bytes()
    for content in (b"", whole[:-7], b"text", b"YQ== 0\nYg== x\n"):
        (chatglm / "tokenizer.model").write_bytes(content)
        refused(chatglm, CheckpointError, "the vocabulary is damaged: ")
    (chatglm / "tokenizer.model").unlink()
    refused(chatglm, CheckpointError, "holds no tokenizer")


def test_nothing_of_it_imports_torch(chatglm: Path) -> None:
    script = (
        "import sys\n"
        "from duoka.checkpoint.checkpoint import Checkpoint\n"
        "from duoka.checkpoint.tokenizer_files import refuse_prompts\n"
        f"refuse_prompts(Checkpoint.open({str(chatglm)!r}), ['a b c d'], 6)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)

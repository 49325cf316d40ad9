"""The bytes of single tokens: together those of the text, and one by one the grammar's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiers import only
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from tuning import make_tokenizer

from duoka.engine.grammar import Vocabulary
from duoka.models.text.token_bytes import TokenBytes
from duoka.models.text.tokenizer import load_tokenizer

TEXT = "naïve 你好 🙂\n\tx  y"


def joined(tokenizer: Any, text: str) -> bytes:
    token_bytes = TokenBytes(tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return b"".join(token_bytes.of(token) for token in ids)


def test_tokens_of_single_bytes() -> None:
    tokenizer = make_tokenizer()
    assert joined(tokenizer, TEXT) == TEXT.encode()
    token_bytes = TokenBytes(tokenizer)
    assert {token_bytes.of(token) for token in range(256)} == {
        bytes([number]) for number in range(256)
    }
    assert token_bytes.of(tokenizer.convert_tokens_to_ids("<|user|>")) == b"<|user|>"


def test_a_decoder_that_is_not_known_writes_the_token() -> None:
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    token_bytes = TokenBytes(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert token_bytes.of(1) == b"a"


@pytest.mark.parametrize("name", only(["chatglm3-6b"], ["chatglm3-6b", "glm-4-9b-chat"]))
def test_published_vocabularies(shared_data: Path, name: str) -> None:
    tokenizer = load_tokenizer(shared_data / "tokenizers" / name, {"model_type": "chatglm"})
    # sentencepiece begins a text with a space.
    assert joined(tokenizer, TEXT).decode().lstrip(" ") == TEXT
    known, token_bytes = Vocabulary.of(tokenizer, [], None).tokenizer, TokenBytes(tokenizer)
    texts = [token for token in range(len(tokenizer)) if not known.is_special_token(token)]
    assert [token for token in texts if token_bytes.of(token) != known.decode_bytes([token])] == []

from __future__ import annotations

from pathlib import Path

import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

import duoka
from duoka.engine.detokenizer import Detokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> PreTrainedTokenizerBase:
    return duoka.tokenizer(tiny)


def pieces_of(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    text = Detokenizer(tokenizer)
    return [*(text.add(token) for token in ids), text.finish()]


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


@pytest.mark.parametrize(
    "text",
    [
        "显存不足怎么办？",
        "龘靐 are not in the vocabulary",
        "👩‍👩‍👧 and 🐼",
        " two  spaces",
        "a\n\n b",
    ],
)
def test_pieces_are_whole_characters_and_make_up_the_text(
    tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    ids = encode(tokenizer, text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=examples(60), deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_comes_through(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = encode(tokenizer, text)
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


def test_bytes_that_are_no_character_come_at_the_end(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = encode(tokenizer, "ok 龘")[:-1]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces[:-1]).strip() == "ok"
    assert "\ufffd" in pieces[-1]


def test_special_tokens_are_left_out_but_for_those_that_are_kept(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    special = [number for number, t in tokenizer.added_tokens_decoder.items() if t.special][:2]
    first, second = tokenizer.convert_ids_to_tokens(special)
    letters = tokenizer.encode("ab", add_special_tokens=False)
    for kept, expected in (
        ((), "ab"),
        (special[:1], f"ab{first}"),
        (special, f"{second}ab{first}"),
    ):
        text = Detokenizer(tokenizer, kept)
        pieces = [text.add(token) for token in (special[1], *letters, special[0])]
        assert "".join([*pieces, text.finish()]).replace(" ", "") == expected

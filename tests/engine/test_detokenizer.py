from __future__ import annotations

from pathlib import Path

import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pieces import encode, sentencepiece_like
from transformers import PreTrainedTokenizerBase

import duoka
from duoka.engine.detokenizer import Detokenizer
from duoka.models.text.chatglm_tokenizer import ChatGLMTokenizer
from duoka.models.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> PreTrainedTokenizerBase:
    return duoka.tokenizer(tiny)


def with_blanks(kind: str, request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    if kind != "chatglm3-6b":
        return sentencepiece_like(kind)
    shared: Path = request.getfixturevalue("shared_data")
    config = {"model_type": "chatglm"}
    return load_tokenizer(shared / "tokenizers" / kind, config, native=ChatGLMTokenizer)


BLANKS = [
    "def f(x):\n    return x",
    "a  a\n\n  x    r",
    "a 龘靐龘靐 x龘",
    "龘靐龘靐龘靐龘靐龘靐  a",
]


@pytest.mark.parametrize("kind", ["prepend", "metaspace", "chatglm3-6b"])
@pytest.mark.parametrize("text", BLANKS)
def test_an_answer_continues_its_prompt_wherever_that_ends(
    kind: str, text: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = with_blanks(kind, request)
    ids = encode(tokenizer, text)
    whole = tokenizer.decode(ids)
    assert whole == text
    for end in range(1, len(ids)):
        prompt = str(tokenizer.decode(ids[:end]))
        pieces = pieces_of(tokenizer, ids[end:], ids[:end])
        # The answer has all of a character that the prompt has only begun.
        if "\ufffd" in prompt:
            assert whole.endswith("".join(pieces))
            assert len("".join(pieces)) >= len(whole) - end
        else:
            assert prompt + "".join(pieces) == whole
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_indent_stays() -> None:
    tokenizer = sentencepiece_like("prepend")
    prompt, text = encode(tokenizer, "def f(x):\n"), encode(tokenizer, "def f(x):\n    return x")
    assert text[: len(prompt)] == prompt
    assert "".join(pieces_of(tokenizer, text[len(prompt) :], prompt)) == "    return x"
    # A prompt without a text is none to continue.
    assert "".join(pieces_of(tokenizer, encode(tokenizer, "a x"), [1])) == "a x"


def pieces_of(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], context: list[int] | None = None
) -> list[str]:
    text = Detokenizer(tokenizer, (), context or ())
    return [*(text.add(token) for token in ids), text.finish()]


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

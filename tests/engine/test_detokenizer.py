from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import duoka
from duoka.engine.detokenizer import Detokenizer
from duoka.models.text.chatglm_tokenizer import ChatGLMTokenizer
from duoka.models.text.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny: Path) -> PreTrainedTokenizerBase:
    return duoka.tokenizer(tiny)


def sentencepiece_like(kind: str) -> PreTrainedTokenizerFast:
    """Pieces of which ▁ begins a word, and bytes; written as Llama 2's or T5's files have them."""
    words = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁▁", "▁▁▁▁"]
    letters = "abcdefghijklmnopqrstuvwxyz():"
    words += [*letters, "▁a", "▁x", "▁r"]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("▁", "a"), ("▁", "x"), ("▁", "r")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    steps: list[Any] = [decoders.ByteFallback(), decoders.Fuse()]
    if kind == "prepend":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
        steps = [decoders.Replace("▁", " "), *steps, decoders.Strip(" ", 1, 0)]
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
    backend.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


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

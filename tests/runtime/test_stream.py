from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from duoka.runtime import Generator, Sampling, Stream
from duoka.runtime.stream import Detokenizer


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
def test_pieces_are_whole_characters_and_make_up_the_text(generator: Generator, text: str) -> None:
    ids = encode(generator.tokenizer, text)
    pieces = pieces_of(generator.tokenizer, ids)
    assert "".join(pieces) == generator.tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=examples(60), deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_comes_through(generator: Generator, text: str) -> None:
    ids = encode(generator.tokenizer, text)
    assert "".join(pieces_of(generator.tokenizer, ids)) == generator.tokenizer.decode(ids)


def test_bytes_that_are_no_character_come_at_the_end(generator: Generator) -> None:
    ids = encode(generator.tokenizer, "ok 龘")[:-1]
    pieces = pieces_of(generator.tokenizer, ids)
    assert "".join(pieces[:-1]).strip() == "ok"
    assert "\ufffd" in pieces[-1]


def test_special_tokens_are_left_out_but_for_those_that_are_kept(generator: Generator) -> None:
    tokenizer = generator.tokenizer
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


def test_a_stream_is_the_answer(generator: Generator) -> None:
    prompt = generator.prompt("什么是LoRA？")
    (answer,) = generator.answer([prompt])
    with generator.stream(prompt) as pieces:
        said = list(pieces)
    assert all(said)
    assert "".join(said).strip() == answer.text
    assert pieces.num_tokens == answer.new_tokens


def test_errors_of_the_thread_arrive(generator: Generator) -> None:
    def run(streamer: Any, stop: Any) -> None:
        streamer.put(torch.tensor([[1, 2]]))
        streamer.put(torch.tensor([300]))
        raise torch.OutOfMemoryError("no memory")

    stream = Stream(generator.tokenizer, (), run)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        list(stream)
    assert list(stream) == []


def test_leaving_the_block_ends_the_generation(generator: Generator) -> None:
    tokens = []

    def run(streamer: Any, stop: Any) -> None:
        streamer.put(torch.tensor([[1]]))
        while not stop(torch.tensor([[1]]), None).all():
            tokens.append(1)
            streamer.put(torch.tensor([300]))
            time.sleep(0.001)

    def interrupted() -> None:
        with Stream(generator.tokenizer, (), run) as stream:
            next(stream)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    count = len(tokens)
    time.sleep(0.02)
    assert len(tokens) == count


def test_cancelling_a_model_stops_it_early(generator: Generator) -> None:
    steps = 0

    def count(*_: Any) -> None:
        nonlocal steps
        steps += 1

    handle = generator.model.register_forward_hook(count)
    with generator.stream(generator.prompt("hello"), Sampling(max_new_tokens=32)) as stream:
        stream.cancel()
    handle.remove()
    assert steps < 32


def test_a_stream_that_nobody_holds_ends(generator: Generator) -> None:
    def run(streamer: Any, stop: Any) -> None:
        while not stop(torch.tensor([[1]]), None).all():
            time.sleep(0.001)

    stream = Stream(generator.tokenizer, (), run)
    thread = stream._thread
    assert thread.is_alive()
    del stream
    thread.join(timeout=120)
    assert not thread.is_alive()

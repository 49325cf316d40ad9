"""Answers: where each token of a completion begins in its text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from pieces import encode, sentencepiece_like

from duoka.engine.detokenizer import Detokenizer
from duoka.models.text.token_bytes import TokenBytes
from duoka.serve.answers import CompletionAnswer
from duoka.serve.messages import Delta, Token


@pytest.mark.parametrize("kind", ["prepend", "metaspace"])
@pytest.mark.parametrize("text", ["def f(x):\n    return x", "a  a\n\n  x    r", "x 龘 a"])
def test_offsets_are_where_tokens_begin(kind: str, text: str) -> None:
    """Also where a token brings the blank that SentencePiece marks, or a byte of a character."""
    tokenizer = sentencepiece_like(kind)
    spelled, ids = TokenBytes(tokenizer), encode(tokenizer, text)
    for end in range(1, len(ids)):
        prompt = str(tokenizer.decode(ids[:end]))
        if "\ufffd" in prompt:
            continue  # it ends within a character
        detokenizer = Detokenizer(tokenizer, (), ids[:end])
        pieces = [*(detokenizer.add(token) for token in ids[end:]), detokenizer.finish()]
        answer = "".join(pieces)
        assert prompt + answer == text
        data = [spelled.of(token) for token in ids[end:]]
        tokens = [Token(each.decode(errors="replace"), each, 0.0) for each in data]
        told = CompletionAnswer("m", [""], 1, has_logprobs=True, has_usage=False)
        deltas = [
            Delta(number=0, choice=0, text=piece, tokens=(token,))
            for piece, token in zip(pieces, tokens, strict=False)
        ]
        streamed = [part["choices"][0]["logprobs"] for each in deltas for part in told.take(each)]
        (choice,) = told.to_dict()["choices"]
        offsets = choice["logprobs"]["text_offset"]
        assert [offset for part in streamed for offset in part["text_offset"]] == offsets
        # What stands before a token; of a character that is cut, nothing.
        before = [b"".join(data[:number]).decode(errors="ignore") for number in range(len(data))]
        assert offsets == [len(each) for each in before]
        for token, (start, stop) in zip(tokens, pairwise([*offsets, len(answer)]), strict=True):
            if "\ufffd" not in token.text:
                assert answer[start:stop] == token.text

"""The bytes of single tokens, including tokens with only a part of a character.

Two kinds of vocabularies have such tokens. Byte-level vocabularies (GPT-2) represent each byte by a
printable character. SentencePiece has tokens such as ``<0xE2>`` for bytes of unknown characters.
The decoder of the tokenizer tells the kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from duoka.checkpoint.vocabulary import byte_letters

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_BYTES = {letter: byte for byte, letter in byte_letters().items()}


class TokenBytes:
    """The bytes of each token of a tokenizer.

    If the decoder is of no known kind, `of` returns the bytes of the token's decoded text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(self._backend, "decoder", None)
        state = {} if decoder is None else json.loads(decoder.__getstate__())
        self._decoders = {step["type"]: step for step in _list_steps(state)}
        self._spaces = _find_space(self._decoders)
        self._added = set(tokenizer.get_added_vocab().values())

    def of(self, token: int) -> bytes:
        """Return the bytes of a token; a special token has the bytes of its name."""
        text = None if self._backend is None else self._backend.id_to_token(token)
        if text is None:
            # At the start of a text some decoders drop a space: use the second of two tokens.
            alone, twice = (str(self._tokenizer.decode([token] * n)) for n in (1, 2))
            return twice[len(alone) :].encode(errors="replace")
        if token in self._added:
            return str(text).encode(errors="replace")
        if "ByteLevel" in self._decoders and all(character in _BYTES for character in text):
            return bytes(_BYTES[character] for character in text)
        match = _BYTE.fullmatch(text) if "ByteFallback" in self._decoders else None
        if match is not None:
            return bytes([int(match[1], 16)])
        if self._spaces is None:
            return str(self._tokenizer.decode([token])).encode(errors="replace")
        return str(text).replace(self._spaces, " ").encode(errors="replace")


def _list_steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a decoder, given as JSON, in order."""
    if decoder.get("type") == "Sequence":
        for step in decoder["decoders"]:
            yield from _list_steps(step)
    elif "type" in decoder:
        yield decoder


def _find_space(decoders: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Return a SentencePiece vocabulary's text for a space; None for other vocabularies."""
    if "Metaspace" in decoders:
        return str(decoders["Metaspace"]["replacement"])
    replaced = decoders.get("Replace", {})
    pattern = replaced.get("pattern", {}).get("String")
    return pattern if pattern and replaced.get("content") == " " else None

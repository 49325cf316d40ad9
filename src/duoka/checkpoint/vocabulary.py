"""Vocabularies of the ChatGLM family: parsed as data, converted to `tokenizers` encodings.

ChatGLM2 and 3 publish a sentencepiece model, GLM-4 a tiktoken rank file; both become a byte-pair
encoding with the same ids.

sentencepiece's protocol buffer (``sentencepiece_model.proto``: pieces and normalizer) and
tiktoken's lines of base64 and rank are parsed here: a damaged file ends in CheckpointError.
The package `sentencepiece` exposes no normalizer, and transformers can't be imported for a plan.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from duoka.base.files import read_bytes
from duoka.errors import CheckpointError

from .headers import INCOMPLETE, reading

# The published pattern of GLM-4: splits a text before its bytes are merged.
_GLM4_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MAX_BYTES = 64 * 2**20  # the largest published vocabularies have 5 MiB
_VARINT, _LENGTH = 0, 2
_FIXED_LENGTHS = {1: 8, 5: 4}
_BPE = 2


class PieceKind(IntEnum):
    """Kind of a piece (token) of a sentencepiece model, with the numbers of its format."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceModel:
    """Pieces (text, score, kind) in the order of their ids, and the normalization of texts.

    `charsmap` holds compiled normalization rules; empty for none.
    """

    pieces: tuple[tuple[str, float, PieceKind], ...]
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def encoding_of(model: SentencePieceModel | Mapping[bytes, int]) -> Tokenizer:
    """Build the encoding of a vocabulary, without the special tokens of its model."""
    if isinstance(model, SentencePieceModel):
        return _sentencepiece_backend(model)
    return _tiktoken_backend(model)


def read_vocabulary(path: Path) -> SentencePieceModel | dict[bytes, int]:
    """Read a vocabulary, tiktoken's (first line: token and rank) or else sentencepiece's."""
    with reading(path):
        content = read_bytes(path, most_bytes=_MAX_BYTES)
    words = content.split(b"\n", 1)[0].split(b" ")
    try:
        if len(words) == 2 and words[1].isdigit():
            return _ranks(content)
        return _sentencepiece(content)
    except (ValueError, IndexError, struct.error) as error:
        raise CheckpointError(
            f"{path}: the vocabulary is damaged: {str(error)[:100]}", hint=INCOMPLETE
        ) from error


def _ranks(content: bytes) -> dict[bytes, int]:
    """Parse tiktoken's lines into ranks by token; raise ValueError for invalid ranks."""
    ranks: dict[bytes, int] = {}
    for line in filter(None, content.splitlines()):
        token, rank = line.split(b" ")
        ranks[base64.b64decode(token, validate=True)] = int(rank)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("its ranks are not consecutive from 0")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError("it lacks some of the 256 single bytes")
    return ranks


def _sentencepiece(content: bytes) -> SentencePieceModel:
    """Parse a sentencepiece model; raise ValueError if it is no byte-pair encoding."""
    # Fields of the model: 1 is a piece (repeated), 2 the trainer's settings, 3 the normalizer's.
    messages: dict[int, list[dict[int, int | bytes]]] = {1: [], 2: [{}], 3: [{}]}
    for number, value in _fields(content):
        if number in messages and isinstance(value, bytes):
            messages[number].append(dict(_fields(value)))
    trainer, normalizer = messages[2][-1], messages[3][-1]
    if not messages[1] or trainer.get(3, 1) != _BPE:
        raise ValueError("it is not a byte-pair encoding")
    charsmap = normalizer.get(2, b"")
    return SentencePieceModel(
        pieces=tuple(map(_piece, messages[1])),
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
    )


def _piece(fields: dict[int, int | bytes]) -> tuple[str, float, PieceKind]:
    """Return text, score and kind of a piece: its fields 1, 2 and 3, or their defaults."""
    match fields.get(1, b""), fields.get(2, bytes(4)), fields.get(3, 1):
        case bytes(text), bytes(score), int(kind):
            return text.decode(), struct.unpack("<f", score)[0], PieceKind(kind)
    raise ValueError("a piece has fields of the wrong type")


# Protocol buffers: each field is a key, then a value. The key is a varint of field number * 8 +
# wire type: 0 a varint, 1 eight bytes, 2 a length (varint) and as many bytes, 5 four bytes. A
# varint has 7 bits in each byte, the lowest first; the top bit marks that another byte follows:
#
#   08 96 01     key 8 = field 1, type 0; value 0x16 + (0x01 << 7) = 150
#   12 02 68 69  key 0x12 = field 2, type 2; length 2; "hi"
def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protocol buffer message: numbers, or undecoded bytes."""
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        number, kind = key >> 3, key & 7
        if kind in (_VARINT, _LENGTH):
            value, offset = _varint(message, offset)
        elif kind in _FIXED_LENGTHS:
            value = _FIXED_LENGTHS[kind]
        else:
            raise ValueError(f"a field of unknown type {kind}")
        if kind == _VARINT:
            yield number, value
            continue
        if offset + value > len(message):
            raise ValueError("it ends within a field")
        yield number, message[offset : offset + value]
        offset += value


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    """Decode the varint at an offset; return the number and the offset behind it."""
    value = 0
    for shift in range(0, 70, 7):
        byte = message[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise ValueError("a number of more than 64 bits")


def _sentencepiece_backend(model: SentencePieceModel) -> Tokenizer:
    """Build the `tokenizers` encoding of a sentencepiece model."""
    vocabulary = {text: number for number, (text, _, _) in enumerate(model.pieces)}
    if len(vocabulary) != len(model.pieces):
        raise CheckpointError("tokenizer.model: a piece occurs twice")
    normal = {text: -score for text, score, kind in model.pieces if kind == PieceKind.NORMAL}
    bytes_known = any(kind == PieceKind.BYTE for _, _, kind in model.pieces)
    unknown = next((text for text, _, kind in model.pieces if kind == PieceKind.UNKNOWN), None)
    merges = _merges(normal, vocabulary)
    backend = Tokenizer(
        BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=bytes_known)
    )
    # The text " Hi  you" by step: charsmap (Unicode forms), Strip and Replace "Hi you", Prepend
    # "▁Hi you", Replace "▁Hi▁you". The decoder reverses them but for the blanks that were removed.
    steps: list[Any] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    decoding: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if model.add_dummy_prefix:
        steps.append(normalizers.Prepend("▁"))
        decoding.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(decoding)
    control = [text for text, _, kind in model.pieces if kind in (2, 3)]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    user = [text for text, _, kind in model.pieces if kind == PieceKind.USER_DEFINED]
    backend.add_tokens([AddedToken(text, normalized=False) for text in user])
    return backend


def _tiktoken_backend(ranks: Mapping[bytes, int]) -> Tokenizer:
    """Build the `tokenizers` encoding of tiktoken's ranks, with GLM-4's pattern."""
    letters = byte_letters()
    spelled = {"".join(letters[b] for b in token): rank for token, rank in ranks.items()}
    # As in tiktoken, a text that is a token becomes that token, even if no merges lead there.
    backend = Tokenizer(BPE(vocab=spelled, merges=_merges(spelled, spelled), ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(_GLM4_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _merges(costs: Mapping[str, float], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """List every pair of pieces whose concatenation is a piece, that of the lowest cost first.

    sentencepiece and tiktoken merge any two neighbors whose concatenation is in the vocabulary, so
    every split of a piece counts: "abc" gives ("a", "bc") and ("ab", "c") if all are pieces.
    """
    # A byte-pair encoding repeatedly merges the neighbors that come first in the list of merges.
    # With the ids a 0, b 1, c 2, ab 3, bc 4, abc 5, which are tiktoken's costs as well:
    #
    #   merges    (a, b)  (b, c)  (a, bc)  (ab, c)      by the id of the result, then of the parts
    #   "abc"     a b c → ab c → abc                    (a, b) is before (b, c)
    #
    # sentencepiece's cost is the negative score, and only NORMAL pieces are merge results.
    merges: list[tuple[str, str]] = []
    for piece in sorted(costs, key=lambda piece: (costs[piece], vocabulary[piece])):
        pairs = [
            (head, tail)
            for cut in range(1, len(piece))
            if (head := piece[:cut]) in vocabulary and (tail := piece[cut:]) in vocabulary
        ]
        merges += sorted(pairs, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges


def byte_letters() -> dict[int, str]:
    """Return the character of each byte in a byte-level vocabulary (Radford et al., 2019).

    Printable bytes stand for themselves, the others for the characters from U+0100 on, in order.
    """
    letters = {byte: chr(byte) for byte in (*range(0x21, 0x7F), *range(0xA1, 0xAD))}
    letters |= {byte: chr(byte) for byte in range(0xAE, 0x100)}
    unprintable = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(0x100 + place) for place, byte in enumerate(unprintable)}

"""Vocabulary files as they are published: sentencepiece models and tiktoken rank files.

Both are read as data, by rules of their own here, so that a damaged or hostile file ends in a
`CheckpointError` and nothing else.

Sources: the sentencepiece model's protocol buffer (``sentencepiece_model.proto``), of which only
pieces and normalizer are needed; tiktoken's lines of base64 and rank.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from duoka.errors import CheckpointError

_MAX_BYTES = 64 * 2**20  # the largest published vocabularies have 5 MiB
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_BPE = 2


class PieceKind(IntEnum):
    """What a piece of a sentencepiece model is for."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class SentencePieceModel:
    """Pieces in the order of their ids, and what is done to a text before.

    Parameters
    ----------
    pieces : tuple of (str, float, PieceKind)
        Text, score and kind.
    charsmap : bytes
        Compiled normalization rules; empty for none.
    add_dummy_prefix, remove_extra_whitespaces : bool
        Whether a text gets a leading space, and whether its spaces are reduced.
    """

    pieces: tuple[tuple[str, float, PieceKind], ...]
    charsmap: bytes = b""
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True


def read_vocabulary(path: Path) -> SentencePieceModel | dict[bytes, int]:
    """Read a vocabulary of either form; which one is told by its first line."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path}: larger than any vocabulary ({_MAX_BYTES} bytes)")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: the vocabulary cannot be read: {error}") from error
    first = content.split(b"\n", 1)[0].split(b" ")
    try:
        if len(first) == 2 and first[1].isdigit():
            return _ranks(content)
        return _sentencepiece(content)
    except (ValueError, IndexError, struct.error, binascii.Error) as error:
        raise CheckpointError(f"{path}: the vocabulary is damaged: {error}") from error


def _ranks(content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for line in content.splitlines():
        if line:
            token, rank = line.split(b" ")
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("its ranks don't count from 0")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError("it lacks some of the 256 single bytes")
    return ranks


def _sentencepiece(content: bytes) -> SentencePieceModel:
    pieces: list[tuple[str, float, PieceKind]] = []
    normalizer: dict[int, int | bytes] = {}
    trainer: dict[int, int | bytes] = {}
    for number, value in _fields(content):
        if number == 1 and isinstance(value, bytes):
            pieces.append(_piece(dict(_fields(value))))
        elif number == 2 and isinstance(value, bytes):
            trainer = dict(_fields(value))
        elif number == 3 and isinstance(value, bytes):
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("it has no pieces")
    if trainer.get(3, 1) != _BPE:
        raise ValueError("it is no byte-pair encoding")
    charsmap = normalizer.get(2, b"")
    return SentencePieceModel(
        pieces=tuple(pieces),
        charsmap=charsmap if isinstance(charsmap, bytes) else b"",
        add_dummy_prefix=bool(normalizer.get(3, 1)),
        remove_extra_whitespaces=bool(normalizer.get(4, 1)),
    )


def _piece(fields: dict[int, int | bytes]) -> tuple[str, float, PieceKind]:
    text, score, kind = fields.get(1, b""), fields.get(2, bytes(4)), fields.get(3, 1)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(kind, int):
        raise ValueError("a piece has fields of the wrong type")
    return text.decode(), struct.unpack("<f", score)[0], PieceKind(kind)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protocol buffer message: numbers, or bytes not yet read."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            number, at = _varint(message, at)
            yield key >> 3, number
            continue
        if kind == _LENGTH:
            length, at = _varint(message, at)
        elif kind in (_EIGHT_BYTES, _FOUR_BYTES):
            length = 8 if kind == _EIGHT_BYTES else 4
        else:
            raise ValueError(f"a field of the unknown type {kind}")
        if at + length > len(message):
            raise ValueError("it ends within a field")
        yield key >> 3, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")

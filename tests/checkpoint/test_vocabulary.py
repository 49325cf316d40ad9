from __future__ import annotations

import base64
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.checkpoint import vocabulary
from duoka.checkpoint.vocabulary import PieceKind, SentencePieceModel, read_vocabulary
from duoka.errors import CheckpointError

BYTES = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    return path


def test_published_files(shared_data: Path) -> None:
    model = read_vocabulary(shared_data / "tokenizers" / "chatglm3-6b" / "tokenizer.model")
    assert isinstance(model, SentencePieceModel)
    assert len(model.pieces) == 64789
    assert model.pieces[0][::2] == ("<unk>", PieceKind.UNKNOWN)
    assert model.pieces[13] == ("<0x0A>", 0.0, PieceKind.BYTE)
    assert (model.charsmap, model.add_dummy_prefix, model.remove_extra_whitespaces) == (
        *(b"", True, False),
    )
    ranks = read_vocabulary(shared_data / "tokenizers" / "glm-4-9b-chat" / "tokenizer.model")
    assert isinstance(ranks, dict)
    assert len(ranks) == 151329


def test_ranks(tmp_path: Path) -> None:
    content = b"\n".join([*BYTES, base64.b64encode(b"ab") + b" 256", b""])
    ranks = read_vocabulary(write(tmp_path, content))
    assert isinstance(ranks, dict)
    assert ranks[b"ab"] == 256


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 100,
        b"\x0a\xff\xff\xff\xff\x7f",
        b"\x0a\x02\x18\x09",
        b"\x0a\x04\x0a\x02\xff\xfe",
        b"\x0a\x02\x08\x01",
        b"\x0b",
        b"\n".join(BYTES[1:]),
        b"\n".join([*BYTES, b"YWI= 300"]),
        b"\n".join([*BYTES, b"Y*I= 256"]),
        b"\n".join([*BYTES, b"YWI= 256 7"]),
        b"YQ== " + b"9" * 5000,
        b"not a vocabulary at all",
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
        read_vocabulary(write(tmp_path, content))


@given(content=st.binary(max_size=200))
def test_any_bytes_end_in_our_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_vocabulary(path)


def test_missing_and_oversized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="can't be read"):
        read_vocabulary(tmp_path / "none")
    monkeypatch.setattr(vocabulary, "_MAX_BYTES", 10)
    with pytest.raises(CheckpointError, match="more than 10 bytes"):
        read_vocabulary(write(tmp_path, b"x" * 11))

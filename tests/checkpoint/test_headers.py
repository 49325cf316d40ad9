"""Headers: what a file says about its tensors is believed only where it can be true."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from duoka.checkpoint.headers import read_header, read_index
from duoka.errors import CheckpointError


def write_header(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert caught.value.hint
    return caught.value


@pytest.mark.parametrize(
    "file", ["../secret.safetensors", "sub/model.safetensors", "model.bin", "", None]
)
def test_an_index_cannot_lead_elsewhere(tmp_path: Path, file: object) -> None:
    path = tmp_path / "index.json"
    path.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointError, match="is not the name of a"):
        read_index(path, suffix=".safetensors")


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": ["a"]}])
def test_an_index_needs_a_weight_map(tmp_path: Path, index: object) -> None:
    path = tmp_path / "index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="has no weight_map"):
        read_index(path, suffix=".safetensors")


@pytest.mark.parametrize("length", [0, 7, 8, 20, -1])
def test_truncated_safetensors(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": np.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:length])
    error = refused(tmp_path / "model.safetensors")
    assert "truncated" in str(error)
    assert error.hint is not None


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        ({"w": entry()}, 5, "bytes outside all tensors"),
        ({"w": entry()}, 3, "truncated"),
        ({"w": entry(offsets=[0, 8])}, 8, "shape and type need 4"),
        ({"w": entry(offsets=[-4, 0])}, 0, "shape and type need 4"),
        ({"w": entry(offsets=[4, 8])}, 8, "is preceded by a gap"),
        ({"w": entry(), "v": entry(offsets=[2, 6])}, 6, "overlaps"),
        ({"w": entry(), "v": entry()}, 4, "overlaps"),
        ({"w": entry(dtype="F31")}, 4, "an unsupported type"),
        ({"w": entry(shape=[-1])}, 4, "an invalid shape"),
        ({"w": entry(shape=[True])}, 4, "an invalid shape"),
        ({"w": entry(shape=[2**62, 2**62])}, 4, "shape and type need"),
        ({"w": entry(shape=[1] * 65)}, 4, "an invalid shape"),
        ({"w": entry(shape=[2**63, 0], offsets=[0, 0])}, 0, "an invalid shape"),
        ({"w": entry("U8", offsets=[False, True])}, 1, "invalid description of"),
        ({"w": entry(offsets=[2**64, 2**64 + 4])}, 4, "is preceded by a gap"),
        ({"w": entry("F4", [3], [0, 2])}, 2, "shape and type need 1"),
        ({"a\x1b[2J": entry()}, 4, "names a tensor 'a\\x1b[2J', which is not a valid tensor name"),
        ({"a" * 1025: entry()}, 4, "which is not a valid tensor name"),
        ({"__metadata__": {"a": 1}}, 0, "metadata that is not"),
        ({"w": None}, 4, "invalid description of"),
        ([], 0, "doesn't begin with"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: object, data_bytes: int, message: str) -> None:
    write_header(tmp_path / "model.safetensors", header, bytes(data_bytes))
    assert message in str(refused(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b' {"a": 1}', "doesn't begin with '{'"),
        (b"\xef\xbb\xbf{}", "doesn't begin with '{'"),
        ("{}".encode("utf-16"), "doesn't begin with '{'"),
        (b'{"\xff": 1}', "is not UTF-8"),
        (b'{"\xed\xa0\x80": 1}', "is not UTF-8"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": 1e999}', "is not valid JSON"),
        (b'{"a": ' + b"[" * 10**5, "is not valid JSON"),
        (b'{"a": ' + b"9" * 10**4 + b"}", "is not valid JSON"),
        (b'{"a": 1, "\\u0061": 1}', "the key 'a' occurs twice"),
        (b"{}{}", "is not valid JSON"),
    ],
)
def test_headers_that_two_readers_may_understand_differently(
    text: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert message in str(refused(tmp_path / "x.safetensors"))


def test_a_header_of_very_many_values(tmp_path: Path) -> None:
    text = b'{"a": [' + b"[]," * 2_500_000 + b"[]]}"
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    tracemalloc.start()
    assert "has 5000003 values; at most 4000000 are read" in str(
        refused(tmp_path / "x.safetensors")
    )
    assert tracemalloc.get_traced_memory()[1] < 3 * len(text)
    tracemalloc.stop()


def test_a_length_takes_no_memory(tmp_path: Path) -> None:
    for length in (2**63, 10**8, 2**40, 100):
        (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
        tracemalloc.start()
        refused(tmp_path / "x.safetensors")
        assert tracemalloc.get_traced_memory()[1] < 2**18
        tracemalloc.stop()


def test_a_header_with_an_empty_tensor_and_four_bit_numbers(tmp_path: Path) -> None:
    header = {"e": entry(shape=[0], offsets=[0, 0]), "q": entry("F4", [3, 2], [0, 3])}
    write_header(tmp_path / "model.safetensors", header, bytes(3))
    tensors = read_header(tmp_path / "model.safetensors")
    assert sum(tensor.nbytes or 0 for tensor in tensors.values()) == 3

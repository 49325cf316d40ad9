"""Headers: what a file says about its tensors is believed only where it can be true."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from duoka.errors import CheckpointError
from duoka.headers import read_header, read_index, read_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "X"]) | JSON,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(-1, 64), min_size=2, max_size=2) | JSON,
    }
)


def write_header(path: Path, header: object, data: bytes = b"") -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def refused(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    return caught.value


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/model.safetensors",
        "..\\secret.safetensors",
        "model.bin",
        "..",
        "",
        "a\0.safetensors",
        7,
        None,
    ],
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
    assert "cut off" in str(error)
    assert error.hint is not None


def entry(dtype: object = "F32", shape: object = (1,), offsets: object = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        ({"w": entry()}, 5, "bytes that belong to no tensor"),
        ({"w": entry()}, 3, "cut off"),
        ({"w": entry(offsets=[0, 8])}, 8, "shape and type need 4"),
        ({"w": entry(offsets=[-4, 0])}, 0, "shape and type need 4"),
        ({"w": entry(offsets=[4, 8])}, 8, "follows a hole"),
        ({"w": entry(), "v": entry(offsets=[2, 6])}, 6, "overlaps"),
        ({"w": entry(), "v": entry()}, 4, "overlaps"),
        ({"w": entry(dtype="F31")}, 4, "a type that duoka doesn't know"),
        ({"w": entry(dtype=4)}, 4, "doesn't describe"),
        ({"w": entry(shape=[-1])}, 4, "a shape that no tensor can have"),
        ({"w": entry(shape=[1.0])}, 4, "a shape that no tensor can have"),
        ({"w": entry(shape=[True])}, 4, "a shape that no tensor can have"),
        ({"w": entry(shape=[2**62, 2**62])}, 4, "shape and type need"),
        ({"w": entry(shape=4)}, 4, "doesn't describe"),
        ({"w": entry(offsets=[0, 4, 8])}, 4, "doesn't describe"),
        ({"w": None}, 4, "doesn't describe"),
        ([], 0, "doesn't begin with"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: object, data_bytes: int, message: str) -> None:
    write_header(tmp_path / "model.safetensors", header, bytes(data_bytes))
    assert message in str(refused(tmp_path / "model.safetensors"))


def test_a_header_with_an_empty_tensor_and_four_bit_numbers(tmp_path: Path) -> None:
    header = {"e": entry(shape=[0], offsets=[0, 0]), "q": entry("F4", [3, 2], [0, 3])}
    write_header(tmp_path / "model.safetensors", header, bytes(3))
    tensors = read_header(tmp_path / "model.safetensors")
    assert sum(tensor.nbytes or 0 for tensor in tensors.values()) == 3


def test_a_header_longer_than_the_limit(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert "its header should have 9223372036854775808 bytes" in str(
        refused(tmp_path / "model.safetensors")
    )


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("headers") / "file"


@given(
    header=st.dictionaries(st.text(max_size=3), ENTRIES | JSON, max_size=3) | JSON,
    size=st.integers(0, 64),
)
def test_any_header_is_understood_or_refused(scratch: Path, header: object, size: int) -> None:
    write_header(scratch, header, bytes(size))
    try:
        tensors = read_header(scratch)
    except CheckpointError:
        return
    assert sum(tensor.nbytes or 0 for tensor in tensors.values()) == size


@given(data=st.binary(max_size=64))
def test_any_bytes_are_understood_or_refused(scratch: Path, data: bytes) -> None:
    scratch.write_bytes(data)
    for read in (read_header, read_json, lambda path: read_index(path, suffix=".bin")):
        with contextlib.suppress(CheckpointError):
            read(scratch)

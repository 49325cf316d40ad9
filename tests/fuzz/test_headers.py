"""safetensors files and indices as an attacker writes them, beside the safetensors library."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzzing import JSON, damaged, damaged_text, fuzz
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.headers import read_header, read_index, read_json
from duoka.errors import CheckpointError

_FILE = save(
    {
        "model.embed": np.zeros((3, 4), np.float16),
        "empty": np.zeros((0, 7), np.float32),
        "layer.weight": np.zeros((2, 2, 2), np.int8),
        "scale": np.array(1.0),
    },
    metadata={"format": "pt"},
)
_LENGTH = struct.unpack("<Q", _FILE[:8])[0]
HEADER: dict[str, Any] = json.loads(_FILE[8 : 8 + _LENGTH])
DATA = _FILE[8 + _LENGTH :]
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "F8_E4M3", "U8", "BOOL", "C64", "X", 3]),
        "shape": st.lists(st.integers(-1, 4) | st.sampled_from([2**31, 2**63, True]), max_size=3),
        "data_offsets": st.lists(
            st.integers(-1, 64) | st.sampled_from([2**64, 1.0, False]), min_size=1, max_size=3
        ),
    }
)
CASES: st.SearchStrategy[tuple[bytes, int | None, bytes]] = st.one_of(
    # A header, the length that is told of it (None for the right one), and data.
    st.tuples(
        damaged(HEADER).map(lambda value: json.dumps(value).encode()),
        st.none() | st.integers(0, 2**64 - 1),
        st.sampled_from([DATA, DATA[:-1], DATA + b"\0", b""]) | st.binary(max_size=99),
    ),
    st.tuples(
        damaged_text(json.dumps(HEADER)).map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.none(),
        st.just(DATA),
    ),
    st.tuples(
        st.dictionaries(st.text(max_size=4), ENTRY | JSON, max_size=3).map(
            lambda value: json.dumps(value).encode()
        ),
        st.none(),
        st.integers(0, 64).map(bytes),
    ),
    st.tuples(st.binary(max_size=64), st.none(), st.binary(max_size=16)),
)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def within_memory(action: Callable[[], Any], size: int) -> Any:
    """What an action returns; it may take some times the file's size, and no word's worth."""
    tracemalloc.start()
    try:
        return action()
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100 * size + 2**18


def look_at(error: CheckpointError) -> None:
    """What is told is short, and can't steer a terminal."""
    assert len(str(error)) < 1000
    assert str(error).isprintable()


def understood_by_safetensors(file: Path) -> dict[str, tuple[int, ...]] | None:
    try:
        with safe_open(file, framework="numpy") as opened:
            return {
                name: tuple(opened.get_slice(name).get_shape()) for name in opened.offset_keys()
            }
    except (SafetensorError, OSError, ValueError):
        return None


@fuzz()
@given(case=CASES)
def test_headers(scratch: Path, case: tuple[bytes, int | None, bytes]) -> None:
    text, told, data = case
    file = scratch / "model.safetensors"
    content = struct.pack("<Q", len(text) if told is None else told) + text + data
    file.write_bytes(content)
    try:
        tensors = within_memory(lambda: read_header(file), len(content))
    except CheckpointError as error:
        look_at(error)
        return
    # Nothing is accepted that the library refuses, and both understand the same.
    found = understood_by_safetensors(file)
    assert found is not None
    assert {name: tensor.shape for name, tensor in tensors.items()} == found
    assert sum(tensor.nbytes or 0 for tensor in tensors.values()) == len(data)


INDEX: dict[str, Any] = {
    "metadata": {"total_size": 12},
    "weight_map": {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    },
}
NAMES = st.sampled_from(
    [
        *("../x.safetensors", "/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "x.bin"),
        *(".safetensors", "x.safetensors\n", "x.safetensors\0", "é.safetensors", "CON.safetensors"),
        *("model-00001-of-00002.safetensors", "config.json", "", "~x.safetensors", " .safetensors"),
    ]
)
INDICES = st.one_of(
    damaged(INDEX).map(json.dumps),
    damaged_text(json.dumps(INDEX)),
    st.builds(
        lambda names: json.dumps({"weight_map": names}),
        st.dictionaries(st.text(max_size=5), NAMES | st.text(max_size=12), max_size=4),
    ),
    JSON.map(json.dumps),
)


@fuzz()
@given(text=INDICES)
def test_indices(scratch: Path, text: str) -> None:
    file = scratch / "model.safetensors.index.json"
    content = text.encode("utf-8", "surrogatepass")
    file.write_bytes(content)
    try:
        index = within_memory(lambda: read_index(file, suffix=".safetensors"), len(content))
    except CheckpointError as error:
        look_at(error)
        return
    assert index.files == json.loads(text)["weight_map"]
    for name in index.files.values():
        assert (scratch / name).resolve().parent == scratch.resolve()
        assert name.endswith(".safetensors")


@pytest.mark.slow
@fuzz()
@given(text=INDICES, shards=st.sets(st.sampled_from(list(INDEX["weight_map"].values()))))
def test_directories(scratch: Path, text: str, shards: set[str]) -> None:
    root = scratch / "model"
    root.mkdir(exist_ok=True)
    (root / "config.json").write_text("{}")
    (root / "model.safetensors.index.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    for name, key in zip(INDEX["weight_map"].values(), "ab", strict=True):
        (root / name).unlink(missing_ok=True)
        if name in shards:
            (root / name).write_bytes(save({key: np.zeros(1)}))
    try:
        checkpoint = Checkpoint.open(root)
    except CheckpointError as error:
        look_at(error)
        return
    if checkpoint.has_weights:
        assert set(checkpoint.tensors or ()) >= set(json.loads(text)["weight_map"])


@fuzz()
@given(content=st.binary(max_size=99) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes(scratch: Path, content: bytes) -> None:
    file = scratch / "any.json"
    file.write_bytes(content)
    for read in (read_header, read_json):
        try:
            within_memory(lambda read=read: read(file), len(content))
        except CheckpointError as error:
            look_at(error)

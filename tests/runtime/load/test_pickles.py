"""A pickle gives tensors or is refused, and nothing in it runs."""

from __future__ import annotations

import io
import os
import pickle
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from duoka.errors import LoadError
from duoka.runtime.load.pickles import load_pickle


class Command:
    """A pickle of it is a program."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (self.command,))


class Allocation:
    """A pickle of it takes memory that no file has to hold."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (bytearray, (2**40,))


def refused(file: Path) -> str:
    with pytest.raises(LoadError) as caught:
        load_pickle(file, map_location="cpu")
    return str(caught.value)


STATE = OrderedDict(
    a=torch.arange(6.0).reshape(2, 3),
    b=nn.Parameter(torch.ones(4, dtype=torch.bfloat16)),
    c=torch.tensor(3),
    d=torch.zeros(0, 7, dtype=torch.float16),
    e=torch.arange(12).reshape(3, 4).T,
)


@pytest.mark.parametrize("new", [True, False])
def test_what_torch_saves_is_loaded(new: bool, tmp_path: Path) -> None:
    torch.save(STATE, file := tmp_path / "x.bin", _use_new_zipfile_serialization=new)
    loaded = load_pickle(file, map_location="cpu")
    assert loaded.keys() == STATE.keys()
    for name, tensor in loaded.items():
        assert tensor.dtype == STATE[name].dtype
        assert torch.equal(tensor, STATE[name])
    sketch = load_pickle(file, map_location="meta")
    assert {n: (t.dtype, t.shape) for n, t in sketch.items()} == {
        n: (t.dtype, t.shape) for n, t in loaded.items()
    }


@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("nested", [False, True])
def test_a_program_is_refused_and_does_not_run(new: bool, nested: bool, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    program: Any = Command(f"touch {victim}")
    content = {"a": torch.zeros(1), "b": program} if nested else program
    torch.save(content, file := tmp_path / "x.bin", _use_new_zipfile_serialization=new)
    message = refused(file)
    assert message == f"{file} is refused: it refers to 'posix.system', and weights need no code"
    assert not victim.exists()


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_a_bare_pickle_with_a_program(protocol: int, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    file = tmp_path / "x.bin"
    file.write_bytes(pickle.dumps(Command(f"touch {victim}"), protocol))
    assert ("is refused" if protocol < 4 else "more than tensors") in refused(file)
    assert not victim.exists()


def test_memory_is_not_taken_for_a_word(tmp_path: Path) -> None:
    torch.save({"a": Allocation()}, file := tmp_path / "x.bin")
    assert "damaged, or contains more than tensors" in refused(file)


def rewritten(file: Path, change: Callable[[str, bytes], bytes | None], **options: Any) -> Path:
    """The archive with its entries changed; those that become None are left out."""
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", **options) as archive:
        for name, content in entries.items():
            if (changed := change(name, content)) is not None:
                archive.writestr(name, changed)
    return file


def test_a_compressed_archive(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, file := tmp_path / "x.bin")

    def inflate(name: str, content: bytes) -> bytes:
        return bytes(10**8) if name.endswith("/data/0") else content

    rewritten(file, inflate, compression=zipfile.ZIP_DEFLATED)
    tracemalloc.start()
    message = refused(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert message.endswith("in it is compressed: PyTorch doesn't write such files")
    assert peak < 2**20


def test_an_archive_that_declares_more_than_it_has(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(100)}, file := tmp_path / "x.bin")
    content = bytearray(file.read_bytes())
    place = content.rindex(b"/data/0") - len("x")  # the entry's name in the central directory
    size_at = place - 46 + 24
    assert int.from_bytes(content[size_at : size_at + 4], "little") == 400
    content[size_at : size_at + 4] = (2**31).to_bytes(4, "little")
    file.write_bytes(content)
    assert f"it declares {2**31 + file_sizes(file)}" in refused(file)


def file_sizes(file: Path) -> int:
    with zipfile.ZipFile(file) as archive:
        return sum(e.file_size for e in archive.infolist() if not e.filename.endswith("/data/0"))


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
@pytest.mark.parametrize("new", [True, False])
def test_a_file_that_is_cut_off(kept: float, new: bool, tmp_path: Path) -> None:
    torch.save(STATE, file := tmp_path / "x.bin", _use_new_zipfile_serialization=new)
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    if new:
        assert refused(file) == f"{file} is truncated"
    else:
        with pytest.raises(LoadError):
            load_pickle(file, map_location="cpu")


def test_a_tensor_larger_than_its_data(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(100)}, file := tmp_path / "x.bin")

    def enlarge(name: str, content: bytes) -> bytes:
        return (
            content.replace(b"Kd", b"J\xff\xff\xff\x7f") if name.endswith("data.pkl") else content
        )

    assert "damaged, or contains more than tensors" in refused(rewritten(file, enlarge))


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04", b"\x80\x02.", b"<html>", b"\x80\x02K\x01." * 5, bytes(1000)]
)
def test_what_is_no_pickle_at_all(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(LoadError):
        load_pickle(tmp_path / "x.bin", map_location="cpu")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.bin")
    with pytest.raises(LoadError, match="not a regular file"):
        load_pickle(tmp_path / "x.bin", map_location="cpu")


def test_names_that_steer_a_terminal(tmp_path: Path) -> None:
    torch.save({"\x1b[2J": torch.zeros(1)}, file := tmp_path / "x.bin")
    assert "entries that are not tensors" in refused(file)
    assert io.StringIO(refused(file)).read().isprintable()

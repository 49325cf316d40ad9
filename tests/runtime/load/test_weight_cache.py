"""Stacked weights kept for the next load: only when asked, whole, for one checkpoint as it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from duoka import virtual
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import MachineError
from duoka.models import build
from duoka.planner.placement import Placement
from duoka.runtime.dispatch.place_tensors import tensor_names
from duoka.runtime.load import Keeping, load_weights, weight_cache

from .test_load import assert_equal_to_transformers, write

ONE = Placement(entries=(("", "vgpu:0"),))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    virtual.set_gpus([None])
    return tmp_path / "cache"


def load(path: Path, *, wanted: bool = True, dtype: torch.dtype | None = None) -> list[str]:
    told: list[str] = []
    checkpoint = Checkpoint.open(path)
    model = build(checkpoint.config, dtype=dtype)
    load_weights(model, checkpoint, ONE, keeping=Keeping(wanted=wanted, notify=told.append))
    if dtype is None:
        assert_equal_to_transformers(model, path)
    assert all(not tensor.is_meta for _, tensor in tensor_names(model))
    return told


def kept(cache: Path) -> list[Path]:
    return sorted(each for each in cache.glob("weights/*"))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_what_was_stacked_is_kept_and_taken(family: str, tmp_path: Path, cache: Path) -> None:
    path = write(family, tmp_path / "model")
    assert load(path, wanted=False) == []
    assert kept(cache) == []
    (told,) = load(path)
    (directory,) = kept(cache)
    assert "of stacked weights kept in" in told
    assert str(directory) in told
    # Asked or not, it is taken, and said so; it can be removed.
    for wanted in (False, True):
        (told,) = load(path, wanted=wanted)
        assert told == f"stacked weights come from {directory}; remove it to forget them"
    read = {file.name for file in directory.iterdir()}
    assert read == {"model-00000.safetensors"}


def test_nothing_is_kept_where_nothing_is_stacked(tmp_path: Path, cache: Path) -> None:
    (told,) = load(write("llama", tmp_path / "model"))
    assert told.startswith("nothing to keep")
    assert kept(cache) == []


def test_another_file_or_type_is_another_load(tmp_path: Path, cache: Path) -> None:
    path = write("mixtral", tmp_path / "model")
    load(path)
    (told,) = load(path, dtype=torch.bfloat16)
    assert "kept in" in told
    assert len(kept(cache)) == 2
    file = next(path.glob("*.safetensors"))
    os.utime(file, ns=(1, 1))  # as if it had been written again
    assert load(path, wanted=False) == []


def test_what_is_damaged_is_not_taken(tmp_path: Path, cache: Path) -> None:
    path = write("mixtral", tmp_path / "model")
    load(path)
    (directory,) = kept(cache)
    file = directory / "model-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert load(path, wanted=False) == []
    (told,) = load(path)
    assert "kept in" in told
    assert load(path, wanted=False) != []


def test_a_full_disk_is_told_before_anything_is_read(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("mixtral", tmp_path / "model")

    class Full:
        free = 1000

    monkeypatch.setattr(weight_cache.shutil, "disk_usage", lambda path: Full)
    checkpoint = Checkpoint.open(path)
    model = build(checkpoint.config)
    with pytest.raises(MachineError, match=r"must be free in .*, and 1000 B are"):
        load_weights(model, checkpoint, ONE, keeping=Keeping(wanted=True))
    assert next(model.parameters()).is_meta


def test_what_fails_leaves_nothing(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("mixtral", tmp_path / "model")

    def fail(tensors: object, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_cache, "save_file", fail)
    checkpoint = Checkpoint.open(path)
    model = build(checkpoint.config)
    with pytest.raises(MachineError, match="can't be kept"):
        load_weights(model, checkpoint, ONE, keeping=Keeping(wanted=True))
    assert next(model.parameters()).is_meta
    assert kept(cache) == []

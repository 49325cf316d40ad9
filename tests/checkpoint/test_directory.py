"""A directory on this machine: links, pipes, pointers, and downloads that aren't done."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import CheckpointError

WAIT = "wait until the download ends, or start it again"
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    (root / "config.json").write_text('{"model_type": "llama"}')
    (root / "tokenizer.json").write_text("{}")
    save_file({"w": np.zeros((2, 3), np.float16)}, root / "model.safetensors")
    return root


def refused(path: Path) -> tuple[str, str | None]:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path).fetch()
    assert caught.value.hint
    return str(caught.value), caught.value.hint


# ── links ──


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "model.safetensors.index.json"),
        *("model.safetensors", "pytorch_model.bin", "tokenizer.json", "tokenizer.model"),
        *("modeling_x.py", "chat_template.jinja", "merges.txt"),
    ],
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_out_of_the_directory(directory: Path, name: str, exists: bool) -> None:
    target = directory.parent / "secret"
    if exists:
        target.write_text("{}")
    (directory / name).unlink(missing_ok=True)
    (directory / name).symlink_to("../secret")
    assert refused(directory) == (
        f"{directory / name} is a link to {target}, outside the checkpoint's directory",
        "copy the file there, or give the directory that contains it",
    )


def test_links_out_by_detours(directory: Path) -> None:
    (directory.parent / "model-secret").mkdir()
    (directory.parent / "model-secret" / "x.json").write_text("{}")
    (directory / "step").symlink_to("..")
    (directory / "x.json").symlink_to("step/model-secret/x.json")
    assert "x.json is a link to" in refused(directory)[0]
    (directory / "x.json").unlink()
    (directory / "x.json").symlink_to("/etc/passwd")
    assert "is a link to /etc/passwd, outside" in refused(directory)[0]
    (directory / "x.json").unlink()
    (directory / "x.json").symlink_to("x.json")
    assert Checkpoint.open(directory).has_weights  # as a link to nothing


def test_a_chat_template_that_is_a_link(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "x.jinja").symlink_to("/etc/passwd")
    assert "x.jinja is a link to /etc/passwd" in refused(directory)[0]


def test_the_links_of_the_hub_cache(directory: Path, tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--model"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    shared = tmp_path / "hub" / "blobs" / "ab"
    shared.mkdir(parents=True)
    for number, file in enumerate(directory.iterdir()):
        place = (shared if number == 0 else repo / "blobs") / f"blob{number}"
        file.rename(place)
        if number == 0:  # a blob that models share
            (repo / "blobs" / place.name).symlink_to(os.path.relpath(place, repo / "blobs"))
        (snapshot / file.name).symlink_to(f"../../blobs/{place.name}")
    assert Checkpoint.open(snapshot).has_weights
    other = tmp_path / "hub" / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "secret").write_text("{}")
    (snapshot / "x.json").symlink_to("../../../models--org--other/blobs/secret")
    assert "x.json is a link to" in refused(snapshot)[0]


# ── what is no file ──


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "x.py"])
def test_pipes_and_sockets_are_not_waited_for(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    assert refused(directory)[0] == f"{directory / name} is not a regular file"
    (directory / name).unlink()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(directory / name))
        assert refused(directory)[0] == f"{directory / name} is not a regular file"


def test_directories_in_place_of_files(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()
    assert not Checkpoint.open(directory).has_weights
    (directory / "config.json").unlink()
    (directory / "config.json").mkdir()
    assert "has no config.json" in refused(directory)[0]


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "tokenizer.model"])
def test_what_git_lfs_leaves(directory: Path, name: str) -> None:
    (directory / "model.safetensors").rename(directory / "other")
    if name == "tokenizer.model":
        (directory / "other").rename(directory / "model.safetensors")
    (directory / name).write_bytes(POINTER)
    assert refused(directory) == (
        f"{directory / name} is a git-lfs pointer, not the file itself",
        f"download the files: git -C {directory} lfs pull",
    )


# ── what isn't done ──


def test_aria2_fills_holes_in_a_file_of_full_length(directory: Path) -> None:
    control = directory / "model.safetensors.aria2"
    control.touch()
    message = f"{directory / 'model.safetensors'} is incomplete: {control.name} exists beside it"
    assert refused(directory) == (message, WAIT)


def test_pickles_shorter_than_their_index_says(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1000}, "weight_map": {"w": "pytorch_model-1.bin"}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (directory / "pytorch_model-1.bin").write_bytes(bytes(999))
    message, _ = refused(directory)
    assert message == (
        f"{directory} is incomplete: its index declares 1000 bytes of weights, and the 1 files "
        "contain 999"
    )
    (directory / "pytorch_model-1.bin").write_bytes(bytes(1000))
    assert Checkpoint.open(directory).format == "bin"

"""Checkpoints: published forms are read, and whatever is missing or damaged is named."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from duoka.checkpoint.checkpoint import Checkpoint, differences
from duoka.errors import CheckpointError, UsageError

CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16", "max_position_embeddings": 4096}


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    root = tmp_path / "model"
    root.mkdir()
    write_json(root / "config.json", CONFIG)
    return root


@pytest.fixture
def sharded(directory: Path) -> Path:
    save_file({"a": np.zeros((2, 3), np.float16)}, directory / "model-00001-of-00002.safetensors")
    save_file({"b": np.zeros(5, np.float32)}, directory / "model-00002-of-00002.safetensors")
    write_index(directory, {"a": 1, "b": 2})
    return directory


def write_index(root: Path, shards: dict[str, int], kind: str = "safetensors") -> None:
    stem = "model" if kind == "safetensors" else "pytorch_model"
    files = {name: f"{stem}-0000{number}-of-00002.{kind}" for name, number in shards.items()}
    write_json(root / f"{stem}.{kind}.index.json", {"metadata": {}, "weight_map": files})


def test_single_safetensors(directory: Path) -> None:
    save_file(
        {"w": np.zeros((2, 3), np.float16), "scale": np.array(1, np.float32)},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config is None
    assert (checkpoint.format, checkpoint.has_weights) == ("safetensors", True)
    assert checkpoint.files == (directory / "model.safetensors",)
    assert checkpoint.tensors is not None
    tensor = checkpoint.tensors["w"]
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == ("float16", (2, 3), 12)
    assert tensor.file == directory / "model.safetensors"
    assert checkpoint.tensors["scale"].shape == ()
    assert checkpoint.weight_bytes == 16


def test_single_bin_has_unknown_names(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(b"never opened")
    checkpoint = Checkpoint.open(directory)
    assert (checkpoint.format, checkpoint.has_weights) == ("bin", True)
    assert checkpoint.tensors is None
    assert checkpoint.weight_bytes is None


def test_sharded_bin_has_the_names_of_its_index(directory: Path) -> None:
    for number in (1, 2):
        (directory / f"pytorch_model-0000{number}-of-00002.bin").write_bytes(b"never opened")
    write_index(directory, {"a": 1, "b": 2}, "bin")
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.format == "bin"
    assert checkpoint.tensors is not None
    assert set(checkpoint.tensors) == {"a", "b"}
    assert checkpoint.tensors["b"].file == directory / "pytorch_model-00002-of-00002.bin"
    assert checkpoint.weight_bytes is None


@pytest.mark.parametrize(
    ("name", "near"), [("gml", "did you mean 'models/glm'?"), ("x", "ls models")]
)
def test_a_misspelt_path_in_a_directory_is_not_looked_for_on_the_hub(
    name: str, near: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/glm").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no such directory: 'models/") as caught:
        Checkpoint.open(f"models/{name}")
    assert near in str(caught.value.hint)
    # Who means the Hub can say so: the hint is followed.
    asked: list[object] = []

    def open_snapshot(name: object) -> None:
        asked.append(name)
        raise CheckpointError("it was asked")

    monkeypatch.setattr("duoka.checkpoint.hub.open_snapshot", open_snapshot)
    wanted = str(caught.value.hint).rpartition(" ")[2]
    for text, revision in ((wanted, None), (f"models/{name}", "main")):
        with pytest.raises(CheckpointError, match="it was asked"):
            Checkpoint.open(text, revision=revision)
    assert [str(each) for each in asked] == [f"models/{name}"] * 2


@pytest.mark.parametrize(
    ("config", "index", "num_tensors"),
    [
        ("chatglm3-6b.json", "chatglm3-6b.pytorch_model.bin.index.json", 200),
        ("glm-4-9b-chat.json", "glm-4-9b-chat.model.safetensors.index.json", 284),
    ],
)
def test_published_config_and_index_without_weights(
    published_data: Path, tmp_path: Path, config: str, index: str, num_tensors: int
) -> None:
    shutil.copy(published_data / "configs" / config, tmp_path / "config.json")
    shutil.copy(published_data / "indices" / index, tmp_path / index.partition(".")[2])
    checkpoint = Checkpoint.open(tmp_path)
    assert (checkpoint.format, checkpoint.has_weights, checkpoint.files) == ("none", False, ())
    assert checkpoint.tensors is not None
    assert len(checkpoint.tensors) == num_tensors
    assert all(tensor.file is None for tensor in checkpoint.tensors.values())
    assert checkpoint.default_dtype == ("float16" if "chatglm3" in config else "bfloat16")
    assert checkpoint.max_context_tokens == (8192 if "chatglm3" in config else 131072)


def test_config_alone(directory: Path, tmp_path: Path) -> None:
    save_file({"w": np.zeros(1)}, directory / "model.safetensors")
    for path in (directory / "config.json", tmp_path / "other.json"):
        if not path.exists():
            write_json(path, CONFIG)
        checkpoint = Checkpoint.open(path)
        assert checkpoint.path == path
        assert (checkpoint.format, checkpoint.tensors, checkpoint.files) == ("none", None, ())
    (directory / "model.safetensors").unlink()
    assert not Checkpoint.open(directory).has_weights


def test_source_order(sharded: Path) -> None:
    """An index of one format without its files gives way to a complete set of the other."""
    for file in sharded.glob("*.safetensors"):
        file.unlink()
    assert Checkpoint.open(sharded).format == "none"
    (sharded / "pytorch_model.bin").write_bytes(b"x")
    assert Checkpoint.open(sharded).format == "bin"
    save_file({"w": np.zeros(1)}, sharded / "model.safetensors")
    assert Checkpoint.open(sharded).format == "safetensors"


@pytest.mark.parametrize(
    ("config", "dtype", "context"),
    [
        ({"torch_dtype": "float16", "seq_length": 8192}, "float16", 8192),
        ({"dtype": "torch.bfloat16", "n_positions": 1024}, "bfloat16", 1024),
        ({"dtype": None, "torch_dtype": "float32"}, "float32", None),
        ({"text_config": {"dtype": "bfloat16", "max_position_embeddings": 7}}, "bfloat16", 7),
        ({"dtype": "auto", "max_position_embeddings": -1}, None, None),
        ({"dtype": 3, "max_position_embeddings": "4096", "text_config": []}, None, None),
        ({"max_position_embeddings": True}, None, None),
    ],
)
def test_dtype_and_context(
    directory: Path, config: dict[str, Any], dtype: str | None, context: int | None
) -> None:
    write_json(directory / "config.json", config)
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.default_dtype == dtype
    assert checkpoint.max_context_tokens == context


def test_dtype_of_most_bytes_when_the_config_is_silent(directory: Path) -> None:
    write_json(directory / "config.json", {})
    save_file(
        {"a": np.zeros(9, np.float16), "b": np.zeros(2, np.float32), "c": np.zeros(99, np.int64)},
        directory / "model.safetensors",
    )
    assert Checkpoint.open(directory).default_dtype == "float16"


def test_what_differs(sharded: Path, tmp_path: Path) -> None:
    one = Checkpoint.open(sharded).fingerprint
    copy = tmp_path / "copy"
    shutil.copytree(sharded, copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 1.5}))
    other = Checkpoint.open(copy).fingerprint
    assert differences(one, one) == ()
    assert differences(one, other) == ("config.json",)
    assert len(differences(one, "of a module")) == 3


def test_fingerprint(sharded: Path, tmp_path: Path) -> None:
    fingerprint = Checkpoint.open(sharded).fingerprint
    copy = tmp_path / "copy"
    shutil.copytree(sharded, copy)
    os.utime(copy / "config.json", (1, 1))
    text = json.dumps(dict(reversed(CONFIG.items())), indent=4)
    (copy / "config.json").write_text(text)
    assert Checkpoint.open(copy).fingerprint == fingerprint

    (copy / "unused.py").write_text("x = 1")
    assert Checkpoint.open(copy).fingerprint == fingerprint
    write_json(copy / "config.json", CONFIG | {"auto_map": {"AutoModel": "unused.Model"}})
    without_code = Checkpoint.open(copy).fingerprint
    with_code = Checkpoint.open(copy, trust_remote_code=True).fingerprint
    (copy / "unused.py").write_text("x = 2")
    assert Checkpoint.open(copy).fingerprint == without_code
    with_other_code = Checkpoint.open(copy, trust_remote_code=True).fingerprint
    assert len({fingerprint, without_code, with_code, with_other_code}) == 4

    write_json(copy / "config.json", CONFIG)
    save_file({"b": np.zeros(6, np.float32)}, copy / "model-00002-of-00002.safetensors")
    assert Checkpoint.open(copy).fingerprint != fingerprint


def refused(path: Path | str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    return caught.value


def test_no_such_path(tmp_path: Path) -> None:
    error = refused(tmp_path / "none")
    assert "no such directory" in str(error)
    assert error.hint is not None
    assert "config.json" in error.hint
    refused("nul\0byte")
    refused("x" * 10_000)


def test_a_directory_has_no_revision(directory: Path) -> None:
    with pytest.raises(UsageError, match="has no revision 'v1'"):
        Checkpoint.open(directory, revision="v1")


def test_wrong_kinds_of_path(directory: Path) -> None:
    (directory / "config.json").unlink()
    assert "has no config.json" in str(refused(directory))
    save_file({"w": np.zeros(1)}, directory / "model.safetensors")
    assert "neither a directory nor a config" in str(refused(directory / "model.safetensors"))


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[]", "a JSON list"), ("", "not valid JSON")]
)
@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "model.safetensors.index.json"]
)
def test_broken_json(directory: Path, name: str, text: str, message: str) -> None:
    (directory / name).write_text(text)
    error = refused(directory)
    assert name in str(error)
    assert message in str(error)


def test_every_missing_shard_is_named(sharded: Path) -> None:
    write_json(
        sharded / "model.safetensors.index.json",
        {
            "weight_map": {
                "a": "model-00001-of-00002.safetensors",
                "x": "y.safetensors",
                "z": "z.safetensors",
            }
        },
    )
    error = refused(sharded)
    assert "and 2 are missing: y.safetensors, z.safetensors" in str(error)
    assert error.hint is not None


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    assert "2 shards" in str(refused(sharded))


def test_index_and_shards_must_agree(sharded: Path) -> None:
    write_index(sharded, {"a": 1, "b": 2, "c": 2})
    assert "'c' in model-00002-of-00002.safetensors" in str(refused(sharded))
    write_index(sharded, {"a": 2, "b": 1})
    assert "2 tensors are not in the file" in str(refused(sharded))
    save_file({"a": np.zeros(1), "b": np.zeros(1)}, sharded / "model-00002-of-00002.safetensors")
    assert "not in the file that the index names" in str(refused(sharded))

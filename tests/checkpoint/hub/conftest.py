"""A Hub on this machine with one checkpoint, and what the tests ask of it."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import hub_server
import huggingface_hub
import numpy as np
import pytest
from hub_server import HubServer, Repo
from safetensors.numpy import save

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.hub import errors
from duoka.errors import CheckpointError, DuokaError

NAME = "org/model"
CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16"}
SIZE = len(json.dumps(CONFIG))
TOKEN = "hf_goodtoken0000"
ATTEMPTS = 1 + len(errors.WAITS_SECONDS)


def some_files() -> dict[str, bytes]:
    """A sharded checkpoint with a tokenizer, and things that no one needs."""
    rng = np.random.default_rng(0)
    shards = {
        f"model-0000{n}-of-00002.safetensors": save(
            {f"layer.{n}.weight": rng.standard_normal((200, 300 * n), np.float32)}
        )
        for n in (1, 2)
    }
    weight_map = {f"layer.{n}.weight": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "generation_config.json": b'{"eos_token_id": 2}',
        "model.safetensors.index.json": json.dumps({"weight_map": weight_map}).encode(),
        "tokenizer.json": b"{}",
        "tokenizer.model": b"not a small file for git",
        "README.md": b"# A model",
        "training_args.bin": b"nobody needs this",
        "logs/events.out": b"nor this",
        **shards,
    }


SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that would have been waited."""
    waited: list[float] = []
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    return waited


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: list[float]) -> Iterator[HubServer]:
    with hub_server.serve() as server:
        server.repos[NAME] = Repo(files=some_files())
        hub_server.use(server, tmp_path, monkeypatch)
        yield server
    huggingface_hub.close_session()


def refused(
    action: Callable[[], object], kind: type[DuokaError] = CheckpointError
) -> tuple[str, str | None]:
    """What the user is told: the message, and the hint. Even its traceback gives nothing away."""
    with pytest.raises(kind) as caught:
        action()
    if kind is CheckpointError:
        assert caught.value.exit_code == 4
    whole = "".join(traceback.format_exception(caught.value)) + str(caught.value.hint)
    assert not any(secret in whole for secret in ("goodtoken", "badtoken", "verysecret"))
    assert caught.value.hint
    return str(caught.value), caught.value.hint


def open_it() -> Checkpoint:
    return Checkpoint.open(NAME)


def fetch_it() -> Checkpoint:
    return Checkpoint.open(NAME).fetch()


def on_disk(hub: HubServer, directory: Path) -> Path:
    """The same repository, downloaded by hand."""
    directory.mkdir()
    for name, content in hub.repos[NAME].files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def download_by_huggingface_hub(hub: HubServer) -> None:
    for name in hub.repos[NAME].files:
        huggingface_hub.hf_hub_download(NAME, name)


def is_right(checkpoint: Checkpoint) -> bool:
    files = some_files()
    return all(file.read_bytes() == files[file.name] for file in checkpoint.files)

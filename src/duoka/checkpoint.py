"""Checkpoint: what a directory with a published model says about itself, without its weights.

Read are ``config.json``, ``generation_config.json``, the headers of safetensors files and the
indices of sharded ones. A 2023-style ``pytorch_model.bin`` is a pickle: it isn't opened here, so
the names in it are known only when an index lists them. Everything is parsed as if an attacker
wrote it (`headers`). Nothing here knows torch, the network, or what a model does with its tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .errors import CheckpointError
from .headers import INCOMPLETE, TensorInfo, read_header, read_index, read_json

_MODEL_DTYPES = ("float16", "bfloat16", "float32", "float64")
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "seq_length",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
)
# transformers looks for weights in this order; so the same files are read.
_Kind = Literal["safetensors", "bin"]
_SOURCES: tuple[tuple[str, _Kind], ...] = (
    ("model.safetensors", "safetensors"),
    ("model.safetensors.index.json", "safetensors"),
    ("pytorch_model.bin", "bin"),
    ("pytorch_model.bin.index.json", "bin"),
)
_SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A published model as it lies on disk; made by `open`.

    Parameters
    ----------
    path : Path
        The directory, or the config alone.
    config : dict
        What ``config.json`` holds.
    generation_config : dict or None
        What ``generation_config.json`` holds.
    tensors : mapping of str to TensorInfo, or None
        By name. None when nothing says what there is: a config alone, or one ``.bin`` file.
    files : tuple of Path
        The files with weights, in the order of their names.
    format : {"safetensors", "bin", "none"}
        Of those files; "none" without any.
    fingerprint : str
        Equal for equal configs, remote code and tensors, wherever they lie; in hexadecimal.
        The tensors' values don't count.
    trust_remote_code : bool
        Whether model code that comes with the checkpoint may run.
    """

    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: Mapping[str, TensorInfo] | None
    files: tuple[Path, ...]
    format: Literal["safetensors", "bin", "none"]
    fingerprint: str
    trust_remote_code: bool = False

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Checkpoint:
        """Read what a checkpoint says about itself.

        Parameters
        ----------
        path : path
            A directory with ``config.json``; weights and indices are optional. Or a config
            alone, under any name that ends in ``.json``; nothing beside it is looked at.
        trust_remote_code : bool
            Let model code that comes with the checkpoint run when the model is built.

        Raises
        ------
        CheckpointError
            If there is no such checkpoint, or it is incomplete or damaged.
        """
        root = _resolve(path)
        alone = root.is_file()
        config = read_json(root if alone else root / "config.json")
        generation = root / "generation_config.json"
        weights = _NO_WEIGHTS if alone else _find_weights(root)
        return cls(
            path=root,
            config=config,
            generation_config=(
                read_json(generation) if not alone and generation.exists() else None
            ),
            tensors=weights.tensors,
            files=weights.files,
            format=weights.format,
            fingerprint=_fingerprint(config, _remote_code(root, config), weights),
            trust_remote_code=trust_remote_code,
        )

    @property
    def has_weights(self) -> bool:
        """Whether the weights are there to be loaded."""
        return self.format != "none"

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of all tensors as stored; None when a tensor's size isn't known."""
        if self.tensors is None:
            return None
        sizes = [tensor.nbytes for tensor in self.tensors.values()]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    @property
    def default_dtype(self) -> str | None:
        """The type that the weights are published in, by torch's name; None when unknown.

        The config's word counts; without one, the type that most of the stored bytes have.
        """
        for config in _with_text_config(self.config):
            for key in ("dtype", "torch_dtype"):
                name = str(config.get(key)).removeprefix("torch.")
                if name in _MODEL_DTYPES:
                    return name
        sizes: dict[str, int] = {}
        for tensor in (self.tensors or {}).values():
            if tensor.dtype in _MODEL_DTYPES:
                sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + (tensor.nbytes or 0)
        return max(sizes, key=sizes.__getitem__, default=None)

    @property
    def max_context_tokens(self) -> int | None:
        """The longest context that the config names; None when it names none."""
        for config in _with_text_config(self.config):
            for key in _CONTEXT_KEYS:
                value = config.get(key)
                if type(value) is int and value > 0:
                    return value
        return None


class _Weights(NamedTuple):
    tensors: Mapping[str, TensorInfo] | None
    files: tuple[Path, ...]
    format: Literal["safetensors", "bin", "none"]


_NO_WEIGHTS = _Weights(None, (), "none")


def _with_text_config(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The config, then the language model's part of it where the model has several."""
    nested = (config.get(key) for key in _TEXT_CONFIGS)
    return [config, *(part for part in nested if isinstance(part, dict))]


def _resolve(path: str | os.PathLike[str]) -> Path:
    root = Path(path).expanduser()
    try:
        mode = root.stat().st_mode
    except (OSError, ValueError) as error:
        text = str(path)
        hint = "give the directory that holds config.json"
        if _HUB_ID.fullmatch(text):
            folder = text.rpartition("/")[2]
            hint = f"download it first: hf download {text} --local-dir {folder}"
        if isinstance(error, PermissionError):
            raise CheckpointError(f"{text!r} can't be read with your permissions") from error
        raise CheckpointError(
            f"no such directory: {text!r}; duoka reads local directories", hint=hint
        ) from error
    if stat.S_ISDIR(mode):
        if not (root / "config.json").exists():
            raise CheckpointError(
                f"{root} holds no config.json", hint="give the directory that holds config.json"
            )
    elif not stat.S_ISREG(mode) or root.suffix != ".json":
        raise CheckpointError(
            f"{root} is neither a directory nor a config",
            hint="give the directory that holds config.json and the weights",
        )
    return root


def _find_weights(root: Path) -> _Weights:
    """Take the first source that is complete; a source with nothing but an index names tensors."""
    promised: _Weights | None = None
    broken: CheckpointError | None = None
    for name, kind in _SOURCES:
        path = root / name
        if not path.exists():
            continue
        if not name.endswith(".index.json"):
            return _single(path, kind)
        index = read_index(path, suffix="." + kind).files
        files = tuple(root / file for file in sorted(set(index.values())))
        absent = [file.name for file in files if not file.exists()]
        if not absent:
            return _sharded(index, files, kind)
        if len(absent) < len(files):
            broken = broken or CheckpointError(
                f"{path} lists {len(files)} files, of which {len(absent)} are not there: "
                f"{', '.join(absent)}",
                hint=INCOMPLETE,
            )
        promised = promised or _Weights({key: TensorInfo(name=key) for key in index}, (), "none")
    if broken is not None:
        raise broken
    if promised is None:
        _refuse_shards_without_index(root)
    return promised or _NO_WEIGHTS


def _refuse_shards_without_index(root: Path) -> None:
    shards = sorted(file.name for file in root.iterdir() if _SHARD.fullmatch(file.name))
    if shards:
        raise CheckpointError(
            f"{root} holds {len(shards)} shards ({shards[0]}, …) but no index of them",
            hint=INCOMPLETE,
        )


def _single(path: Path, kind: _Kind) -> _Weights:
    if kind == "safetensors":
        return _Weights(read_header(path), (path,), kind)
    _refuse_empty(path)
    return _Weights(None, (path,), kind)


def _sharded(index: Mapping[str, str], files: tuple[Path, ...], kind: _Kind) -> _Weights:
    by_name = {file.name: file for file in files}
    if kind == "bin":
        for file in files:
            _refuse_empty(file)
        named = {key: TensorInfo(name=key, file=by_name[shard]) for key, shard in index.items()}
        return _Weights(named, files, kind)
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for key, tensor in read_header(file).items():
            if key in tensors:
                raise CheckpointError(f"the tensor {key!r} stands in two files of {file.parent}")
            tensors[key] = tensor
    misplaced = [
        key
        for key, shard in index.items()
        if key not in tensors or tensors[key].file != by_name[shard]
    ]
    if misplaced:
        raise CheckpointError(
            f"{len(misplaced)} tensors are not in the file that the index names, "
            f"{misplaced[0]!r} in {index[misplaced[0]]} for one",
            hint=INCOMPLETE,
        )
    return _Weights(tensors, files, kind)


def _refuse_empty(path: Path) -> None:
    if path.stat().st_size == 0:
        raise CheckpointError(f"{path} is empty", hint=INCOMPLETE)


def _remote_code(root: Path, config: dict[str, Any]) -> list[Path]:
    """The model's own code, where it has any: another code is another model."""
    return sorted(root.glob("*.py")) if root.is_dir() and "auto_map" in config else []


def _fingerprint(config: dict[str, Any], code: list[Path], weights: _Weights) -> str:
    digest = hashlib.sha256()

    def add(value: object) -> None:
        digest.update(json.dumps(value, sort_keys=True).encode() + b"\n")

    add(config)
    for path in code:
        add([path.name, hashlib.sha256(path.read_bytes()).hexdigest()])
    add(weights.format)
    for name, tensor in sorted((weights.tensors or {}).items()):
        add([name, tensor.dtype, tensor.shape, tensor.file and tensor.file.name])
    # A pickle's contents aren't read; its size is all that is known.
    add([[file.name, file.stat().st_size] for file in weights.files])
    return digest.hexdigest()

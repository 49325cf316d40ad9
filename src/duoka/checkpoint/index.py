"""Index: the weight files of a checkpoint, and the tensors in each file.

A pickle isn't opened here, so its tensors are known only if an index lists them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from duoka.base.files import Stamp
from duoka.errors import CheckpointError

from .directory import Folder
from .headers import INCOMPLETE, Index, TensorInfo, read_index, reading

# The order in which transformers looks for weights, so that the same files are read.
_Kind = Literal["safetensors", "bin"]
_SOURCES: tuple[tuple[str, _Kind], ...] = (
    ("model.safetensors", "safetensors"),
    ("pytorch_model.bin", "bin"),
)
_SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")


class Weights(NamedTuple):
    """Tensors by name, None if no file lists them; and sizes of the weight files by name."""

    tensors: Mapping[str, TensorInfo] | None
    sizes: Mapping[str, int]
    format: Literal["safetensors", "bin", "none"]


NO_WEIGHTS = Weights(None, {}, "none")


# Four sources are tried in transformers' order. A single file is taken at once. An index is taken
# if all its files exist. If none exists, the index gives only names of tensors. If some are
# missing, the download is incomplete: an error, unless a later source is complete.
#
#   model.safetensors.index.json, no shards + pytorch_model.bin   → the pickle
#   model.safetensors.index.json, no shards                       → names, no weights
#   model.safetensors.index.json, 3 of 4 shards                   → error with the missing one
def find_weights(folder: Folder) -> Weights:
    """Find the first complete source of weights; an index without its files gives names only.

    `NO_WEIGHTS` if there is no source at all.
    """
    promised: Weights | None = None
    broken: CheckpointError | None = None
    names = folder.names()
    for single, kind in _SOURCES:
        if single in names:
            sizes = _sizes(folder, [single])
            tensors = folder.headers([single])[single] if kind == "safetensors" else None
            return Weights(tensors, sizes, kind)
        name = f"{single}.index.json"
        if name not in names:
            continue
        index = read_index(folder.fetch(name), suffix="." + kind)
        files = sorted(set(index.files.values()))
        absent = [file for file in files if file not in names]
        if not absent:
            return _sharded(folder, index, files, kind)
        if len(absent) < len(files):
            broken = broken or CheckpointError(
                f"{folder.path / name} lists {len(files)} files, and {len(absent)} are missing: "
                f"{', '.join(absent)}",
                hint=INCOMPLETE,
            )
        names_alone = {key: TensorInfo(name=key) for key in index.files}
        promised = promised or Weights(names_alone, {}, "none")
    shards = sorted(name for name in names if _SHARD.fullmatch(name))
    if promised is None and shards:
        broken = CheckpointError(
            f"{folder.path} holds {len(shards)} shards ({shards[0]}, …) but no index of them",
            hint=INCOMPLETE,
        )
    if broken is not None:
        raise broken
    return promised or NO_WEIGHTS


def _sizes(folder: Folder, names: list[str]) -> dict[str, int]:
    """Return the sizes of files in bytes; refuse empty files."""
    sizes = {name: folder.size(name) for name in names}
    for name, size in sizes.items():
        if size == 0:
            raise CheckpointError(f"{folder.path / name} is empty", hint=INCOMPLETE)
    return sizes


def _sharded(folder: Folder, index: Index, files: list[str], kind: _Kind) -> Weights:
    """Return the weights of a sharded checkpoint; refuse files that contradict the index."""
    sizes = _sizes(folder, files)
    if kind == "bin":
        total = sum(sizes.values())
        if index.total_bytes is not None and total < index.total_bytes:
            raise CheckpointError(
                f"{folder.path} is incomplete: its index declares {index.total_bytes} bytes of "
                f"weights, and the {len(sizes)} files contain {total}",
                hint=INCOMPLETE,
            )
        files_by_key = ((key, folder.path / shard) for key, shard in index.files.items())
        return Weights({key: TensorInfo(name=key, file=f) for key, f in files_by_key}, sizes, kind)
    tensors: dict[str, TensorInfo] = {}
    for header in folder.headers(files).values():
        tensors |= header
    misplaced = [
        key
        for key, shard in index.files.items()
        if key not in tensors or tensors[key].file != folder.path / shard
    ]
    if misplaced:
        raise CheckpointError(
            f"{len(misplaced)} tensors are not in the file that the index names, "
            f"{misplaced[0]!r} in {index.files[misplaced[0]]} for one",
            hint=INCOMPLETE,
        )
    return Weights(tensors, sizes, kind)


def stamps_of(folder: Folder, weights: Weights) -> dict[Path, Stamp]:
    """Return the stamps of the files with weights on this machine."""
    absent = folder.missing(weights.sizes)
    stamps = {}
    for name in weights.sizes.keys() - set(absent):
        path = folder.path / name
        with reading(path):
            stamps[path] = Stamp.of(path.stat())
        if stamps[path].num_bytes != weights.sizes[name]:
            raise CheckpointError(f"{path} is being written", hint=INCOMPLETE)
    return stamps

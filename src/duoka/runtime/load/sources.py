"""Sources: the tensors in a checkpoint's files, described first, then read.

Tensors are mapped from their file and not copied: the operating system drops mapped pages when it
needs memory. Only ``.bin`` files from before PyTorch 1.6 can't be mapped, and are in memory one at
a time. Pickles are read with ``weights_only``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from duoka.base.files import Stamp, why
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.headers import TensorInfo
from duoka.errors import LoadError

from .pickles import DAMAGED, damage_told, load_pickle


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A tensor in a file, under its name in the checkpoint.

    Parameters
    ----------
    name : str
    dtype : torch.dtype
    shape : tuple of int
    file : Path
    stamp : Stamp, optional
        The stamp of the file when the tensor was described; None skips the check for changes.
    offset : int, optional
        The first byte in the file; None if the file's bytes aren't those of the tensor in memory.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    stamp: Stamp | None = None
    offset: int | None = None

    @property
    def num_bytes(self) -> int:
        """The tensor's bytes in memory."""
        return prod(self.shape) * self.dtype.itemsize


def list_sources(checkpoint: Checkpoint) -> dict[str, Source]:
    """Return a description of every tensor of a checkpoint, by name, without reading weights."""
    if not checkpoint.has_weights:
        raise LoadError(
            f"{checkpoint.path} has no weight files",
            hint="download the weight files; planning works without them",
        )
    if checkpoint.format == "safetensors":
        infos = checkpoint.tensors or {}
        return {name: _safetensors_source(checkpoint, info) for name, info in infos.items()}
    sources: dict[str, Source] = {}
    for file in checkpoint.files:
        stamp = checkpoint.stamps.get(file)
        refuse_changed(file, stamp)
        for name, tensor in load_pickle(file, map_location="meta").items():
            if name in sources:
                raise LoadError(
                    f"the tensor {name!r} occurs in {sources[name].file} and {file}", hint=DAMAGED
                )
            shape = tuple(tensor.shape)
            sources[name] = Source(
                name=name, dtype=tensor.dtype, shape=shape, file=file, stamp=stamp
            )
    return sources


def _safetensors_source(checkpoint: Checkpoint, info: TensorInfo) -> Source:
    """Describe a safetensors tensor from its header."""
    assert info.file is not None
    assert info.shape is not None
    dtype = getattr(torch, str(info.dtype), None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(
            f"{info.name!r} is stored as {info.dtype}, which torch doesn't support",
            hint="a newer version of torch may support it",
        )
    # Dtypes of less than a byte have another shape in memory.
    is_plain = prod(info.shape) * dtype.itemsize == info.nbytes
    return Source(
        name=info.name,
        dtype=dtype,
        shape=info.shape,
        file=info.file,
        stamp=checkpoint.stamps.get(info.file),
        offset=info.offset if is_plain else None,
    )


class Reader:
    """Reads tensors, with at most one file open at a time."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._tensors: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file = self._tensors = None

    def read(self, source: Source) -> Tensor:
        """Return a tensor mapped from its file, valid after the reader closes the file."""
        # Checked for each tensor, since reading a mapped file that was truncated ends the process.
        refuse_changed(source.file, source.stamp)
        if self._file != source.file:
            self._file = self._tensors = None
            self._tensors = _open(source.file)
            self._file = source.file
        with damage_told(source.file):
            is_pickle = isinstance(self._tensors, dict)
            read = self._tensors.__getitem__ if is_pickle else self._tensors.get_tensor
            tensor: Tensor = read(source.name)
        return tensor


def _open(file: Path) -> Any:
    """Open a safetensors file, or load a pickle as a dict of tensors."""
    if file.suffix != ".safetensors":
        return load_pickle(file, map_location="cpu")
    with damage_told(file):
        return safe_open(file, framework="pt", device="cpu")


def refuse_changed(file: Path, stamp: Stamp | None) -> None:
    """Raise LoadError if a file has changed since its stamp was taken; a stamp of None passes."""
    if stamp is None:
        return
    try:
        now = Stamp.of(file.stat())
    except OSError as error:
        raise LoadError(f"{file} can't be read: {why(error)}", hint=DAMAGED) from error
    if now != stamp:
        raise LoadError(
            f"{file} has changed since the checkpoint was opened: it had {stamp.num_bytes} bytes, "
            f"and has {now.num_bytes}",
            hint="wait until no program writes into the directory, then try again",
        )

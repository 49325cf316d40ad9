"""Weight cache: fused weights as the model has them, for the next load; only when asked.

Published mixtures of experts hold every expert's matrices apart, thousands of small tensors; a
model has them stacked. What was stacked once can be kept in duoka's cache as safetensors, and is
then read in long stretches. It is for one checkpoint as it lies there, by its files' sizes and
times, and for one version of transformers, which says how they are stacked.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from duoka.base.files import Stamp, cache_directory, why
from duoka.base.units import format_bytes
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.headers import read_header
from duoka.errors import CheckpointError, MachineError
from duoka.models.boxes import Piece
from duoka.models.conversion import Recipe
from duoka.models.quantization import is_composed

from .sources import Source

_VERSION = 1
_SHARD_BYTES = 2**29
_SPARE_BYTES = 2**30
_PREFIX = "kept in the model's form: "


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Whether weights are kept in the model's form, and who is told what becomes of that.

    Parameters
    ----------
    wanted : bool
        Keep what was stacked, where it isn't kept already. What is kept is taken in any case.
    notify : callable, optional
        Called with one line.
    """

    wanted: bool = False
    notify: Callable[[str], None] | None = None

    def tell(self, text: str) -> None:
        """Say something to whoever listens."""
        if self.notify is not None:
            self.notify(text)


class Kept:
    """The fused weights of one checkpoint, in the cache or not."""

    def __init__(
        self, checkpoint: Checkpoint, recipe: Recipe, targets: Mapping[str, Tensor]
    ) -> None:
        sources: dict[str, set[str]] = {}
        for piece in recipe.pieces:
            sources.setdefault(piece.target, set()).add(piece.source)
        self._form = {
            name: (str(targets[name].dtype).removeprefix("torch."), tuple(targets[name].shape))
            for name, parts in sources.items()
            if len(parts) > 1 and not is_composed(targets[name])
        }
        self._targets = targets
        self.num_bytes = sum(targets[name].nbytes for name in self._form)
        self.directory = cache_directory() / "weights" / self._key(checkpoint)

    def __bool__(self) -> bool:
        """Whether there is anything to keep."""
        return bool(self._form)

    def sources(self) -> dict[str, Source] | None:
        """What is kept, by the model's names; None where nothing is, or something else."""
        try:
            sources = {source.name: source for source in self._stored()}
        except (OSError, CheckpointError):
            return None
        form = {
            name: (str(source.dtype).removeprefix("torch."), source.shape)
            for name, source in sources.items()
        }
        return sources if self._form and form == self._form else None

    def refuse_full_disk(self) -> None:
        """Refuse to keep what the disk hasn't room for."""
        there = next(parent for parent in self.directory.parents if parent.exists())
        free, needed = shutil.disk_usage(there).free, self.num_bytes + _SPARE_BYTES
        if free < needed:
            raise MachineError(
                f"to keep {format_bytes(self.num_bytes)} of weights, {format_bytes(needed)} must "
                f"be free in {there}, and {format_bytes(free)} are",
                hint="free some space, name another place in DUOKA_CACHE, or don't keep them",
            )

    def write(self) -> None:
        """Keep the model's tensors, whole or not at all."""
        partial = self.directory.with_name(f".{self.directory.name}.{secrets.token_hex(4)}")
        try:
            partial.mkdir(parents=True)
            for number, names in enumerate(self._shards()):
                tensors = {
                    name: self._targets[name].detach().to("cpu").contiguous() for name in names
                }
                save_file(tensors, partial / f"model-{number:05}.safetensors")
            if self.directory.exists():  # something that isn't the same, or it had been found
                shutil.rmtree(self.directory)
            partial.rename(self.directory)
        except (OSError, SafetensorError) as error:
            reason = why(error) if isinstance(error, OSError) else str(error)
            raise MachineError(
                f"the weights can't be kept in {self.directory}: {reason}",
                hint="name another place in DUOKA_CACHE, or don't keep them",
            ) from error
        finally:
            with suppress(OSError):
                shutil.rmtree(partial)

    def _stored(self) -> Iterator[Source]:
        for file in sorted(self.directory.glob("*.safetensors")):
            stamp = Stamp.of(file.stat())
            for info in read_header(file).values():
                yield Source(
                    name=info.name,
                    dtype=getattr(torch, str(info.dtype)),
                    shape=info.shape or (),
                    file=file,
                    stamp=stamp,
                    offset=info.offset,
                )

    def _shards(self) -> Iterator[list[str]]:
        names: list[str] = []
        size = 0
        for name in self._form:
            if names and size + self._targets[name].nbytes > _SHARD_BYTES:
                yield names
                names, size = [], 0
            names.append(name)
            size += self._targets[name].nbytes
        if names:
            yield names

    def _key(self, checkpoint: Checkpoint) -> str:
        files = [
            (str(file.resolve()), stamp.num_bytes, stamp.modified_ns)
            for file, stamp in sorted(checkpoint.stamps.items())
        ]
        parts = [_VERSION, checkpoint.fingerprint, files, version("transformers"), self._form]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def taken(
    recipe: Recipe, sources: Mapping[str, Source], cached: Mapping[str, Source]
) -> tuple[Recipe, dict[str, Source]]:
    """The recipe and its sources with what is kept in the place of what it was stacked from."""
    pieces = [piece for piece in recipe.pieces if piece.target not in cached]
    for name, source in cached.items():
        whole = tuple((0, extent) for extent in source.shape)
        pieces.append(
            Piece(
                target=name,
                source=_PREFIX + name,
                source_shape=source.shape,
                source_box=whole,
                target_box=whole,
                axes=tuple(range(len(whole))),
            )
        )
    renamed = {
        _PREFIX + name: replace(source, name=_PREFIX + name) for name, source in cached.items()
    }
    return replace(recipe, pieces=tuple(pieces)), {**sources, **renamed}

"""Filling: what is read from the files goes into the model's tensors, piece by piece.

A tensor that the model has in another layout, a stack of experts for one, is never made on the
host: each piece of it goes straight into its place. What becomes a weight in fewer bits is
quantized there, a few rows at a time; where a piece isn't made of whole rows, or its rows don't lie
as the layout takes them, the weight is gathered on the host first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from duoka.errors import LoadError
from duoka.models.boxes import Box, TensorCopy
from duoka.models.conversion import Custom, Recipe
from duoka.models.quantization import computes_in, fill_rows, is_composed, takes_rows

from ..devices import can_pin
from .read_ahead import STRETCH_BYTES, Wait, read_ahead, stretches
from .sources import Reader, Source

Progress = Callable[[int, int], None]
"""Called with the bytes done so far, and the bytes there are."""

# A copy that changes type or layout passes through a buffer of the tensor's size, on the host or
# on the device; so such copies are made in pieces of this size, which CUDA's allocator takes from
# small blocks: there may be no room for a large one beside the weights.
_CHUNK_BYTES = 2**20


class Filler:
    """Copies what a recipe names into a model's tensors, each on its device, and counts that."""

    def __init__(
        self,
        targets: Mapping[str, Tensor],
        sources: Mapping[str, Source],
        progress: Progress | None,
    ) -> None:
        self.filled: dict[str, int] = {}
        self._targets = targets
        self._sources = sources
        self._progress = progress
        self._quantizer = Quantizer()
        self._done_bytes = self._total_bytes = 0

    def fill(self, recipe: Recipe) -> None:
        """Read each source once, file by file, and copy its pieces into their places."""
        pieces_of: dict[str, list[TensorCopy]] = {}
        for piece in recipe.pieces:
            pieces_of.setdefault(piece.source, []).append(piece)
        whole = [name for custom in recipe.customs for name in custom.sources]
        self._total_bytes = sum(self._sources[name].num_bytes for name in (*pieces_of, *whole))
        self._report(0)
        mapped = [name for name in pieces_of if self._sources[name].offset is None]
        self._fill_ahead([self._sources[name] for name in pieces_of.keys() - mapped], pieces_of)
        with Reader() as reader:
            for name in self._in_file_order(mapped):
                tensor = reader.read(self._sources[name])
                self._put_pieces(pieces_of[name], None, tensor)
                self._report(self._sources[name].num_bytes)
            for custom in recipe.customs:
                self._convert(reader, custom)

    def _fill_ahead(
        self, sources: Sequence[Source], pieces_of: Mapping[str, Sequence[TensorCopy]]
    ) -> None:
        kinds = {target.device for target in self._targets.values() if can_pin(target.device)}
        with read_ahead(stretches(sources, STRETCH_BYTES), pinned=bool(kinds)) as stream:
            for filled in stream:
                for part, tensor in filled.tensors():
                    self._put_pieces(pieces_of[part.source.name], part.box, tensor)
                filled.wait = _when_done(kinds)
                self._report(filled.stretch.num_bytes)

    def _put_pieces(self, pieces: Iterable[TensorCopy], box: Box | None, tensor: Tensor) -> None:
        """Copy what a part of a source, or all of it, has of each of its pieces."""
        for piece in pieces:
            part = piece if box is None else _within(piece, box)
            if part is not None:
                origin = [0] * tensor.ndim if box is None else [start for start, _ in box]
                slices = tuple(
                    slice(start - first, stop - first)
                    for (start, stop), first in zip(part.source_box, origin, strict=True)
                )
                self._put(part.target, part.target_box, part.orient(tensor[slices]))

    def _in_file_order(self, names: Iterable[str]) -> list[str]:
        """Files one after another, and within each the order in which it lists its tensors."""
        places = {name: place for place, name in enumerate(self._sources)}
        return sorted(names, key=lambda name: (self._sources[name].file, places[name]))

    def _convert(self, reader: Reader, custom: Custom) -> None:
        tensors = {
            name: reader.read(self._sources[name]) for name in self._in_file_order(custom.sources)
        }
        for name, value in custom.convert(tensors).items():
            self._put(name, tuple((0, extent) for extent in self._targets[name].shape), value)
        self._report(sum(self._sources[name].num_bytes for name in custom.sources))

    def _put(self, name: str, box: Box, source: Tensor) -> None:
        """Copy a piece into its place, or quantize it on the way there."""
        target = self._targets[name]
        extents = [stop - start for start, stop in box]
        if extents != list(source.shape):
            raise LoadError(f"{name}: {list(source.shape)} doesn't fit into {extents}")
        if is_composed(target):
            self._quantizer.put(name, target, box, source)
        else:
            place = target[tuple(slice(start, stop) for start, stop in box)]
            copy_in_chunks(place, source)
        self.filled[name] = self.filled.get(name, 0) + source.numel()

    def _report(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


def _within(piece: TensorCopy, box: Box) -> TensorCopy | None:
    """What a piece takes from a box of its source; None when that is nothing."""
    common = tuple(
        (max(one, other), min(end, limit))
        for (one, end), (other, limit) in zip(piece.source_box, box, strict=True)
    )
    if common == piece.source_box:
        return piece
    if any(start >= stop for start, stop in common):
        return None
    ends = []
    for axis, (start, stop) in zip(piece.axes, piece.target_box, strict=True):
        if axis is None:
            ends.append((start, stop))
        else:
            first = start + common[axis][0] - piece.source_box[axis][0]
            ends.append((first, first + common[axis][1] - common[axis][0]))
    return replace(piece, source_box=common, target_box=tuple(ends))


def _when_done(kinds: Iterable[torch.device]) -> Wait | None:
    """What waits for the copies that were asked for so far; None where there is nothing to wait."""
    events: list[Any] = []
    for device in kinds:
        backend: Any = torch.get_device_module(device)
        events.append(backend.current_stream(device).record_event())
    if not events:
        return None

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


def copy_in_chunks(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into another of its shape with little memory on the way.

    Out of pinned memory it may go on after this returns.
    """
    size = target.numel() * max(target.element_size(), source.element_size())
    as_it_is = source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()
    if as_it_is or size <= _CHUNK_BYTES or target.ndim == 0:
        target.copy_(source, non_blocking=True)
    elif len(target) == 1:
        copy_in_chunks(target[0], source[0])
    else:
        rows = max(1, _CHUNK_BYTES * len(target) // size)
        for start in range(0, len(target), rows):
            copy_in_chunks(target[start : start + rows], source[start : start + rows])


class Quantizer:
    """Fills quantized weights from pieces of the originals, in any order and in several threads."""

    def __init__(self) -> None:
        self._gathered: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        self._lock = threading.Lock()

    def put(self, name: str, target: Tensor, box: Box, source: Tensor) -> None:
        """Quantize a piece of a weight."""
        (start, stop), columns = box
        if columns == (0, target.shape[1]) and takes_rows(target, start, stop):
            fill_rows(target, start, source)
            return
        whole = self._gather(name, target, box, source)
        if whole is not None:
            fill_rows(target, 0, whole)

    def _gather(self, name: str, target: Tensor, box: Box, source: Tensor) -> Tensor | None:
        """The whole weight when its last piece has come."""
        with self._lock:
            if name not in self._gathered:
                self._gathered[name] = torch.empty(target.shape, dtype=computes_in(target))
                self._missing[name] = target.numel()
            whole = self._gathered[name]
        whole[tuple(slice(start, stop) for start, stop in box)] = source
        with self._lock:
            self._missing[name] -= source.numel()
            if self._missing[name]:
                return None
            return self._gathered.pop(name)

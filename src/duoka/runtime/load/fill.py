"""Filling: boxes (slices of tensors) read from the files are copied into the model's tensors.

A tensor that the model has in another layout, such as a stack of experts, is never assembled on the
host: each box is copied straight into its place. A weight in fewer bits is quantized on its device,
some rows at a time; if a box has no whole rows, or rows at which the quantized layout can't be
split, the weight is gathered on the host first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from duoka.errors import LoadError
from duoka.models.boxes import Box, TensorCopy, as_slices, whole_box
from duoka.models.conversion import Recipe
from duoka.models.quantization import (
    ExpertStack,
    StoredRows,
    computes_in,
    fill_rows,
    is_composed,
    takes_rows,
)
from duoka.models.quantization.stacked import Int4Rows, Int4Tiles, Int8Rows, Int8Tiles
from duoka.models.quantization.weights import Nf4Weight
from duoka.models.quantized_checkpoint import StoredWeights

from ..devices import can_pin
from .read_ahead import STRETCH_BYTES, Wait, read_ahead, stretches
from .sources import Reader, Source

Progress = Callable[[int, int], None]
"""Called with the number of bytes done so far and the total."""

# A copy that changes dtype or layout passes through a buffer of the tensor's size, on the host or
# on the device. So such copies are made in chunks of this size, for which CUDA's allocator uses
# small segments: there may be no free memory for a large buffer beside the weights.
_CHUNK_BYTES = 2**20
_NO_GPU = "cpu", "meta"
_QUANTIZED_BY_GPU = Int4Rows, Int4Tiles, Int8Rows, Int8Tiles, Nf4Weight


class Filler:
    """Copies the sources of a recipe into a model's tensors, each on its device.

    `filled` has the number of elements that were copied into each target, by name.
    """

    def __init__(
        self,
        targets: Mapping[str, Tensor],
        sources: Mapping[str, Source],
        progress: Progress | None,
        stored: StoredWeights,
    ) -> None:
        self.filled: dict[str, int] = {}
        self._targets = targets
        self._sources = sources
        self._progress = progress
        self._stored = stored
        gpus = (target.device for target in targets.values() if target.device.type not in _NO_GPU)
        self._quantizer = Quantizer(next(gpus, None))
        self._done_bytes = self._total_bytes = 0

    def fill(self, recipe: Recipe) -> None:
        """Read each source once, file by file, and copy its pieces into their targets."""
        pieces_of: dict[str, list[TensorCopy]] = {}
        for piece in recipe.pieces:
            pieces_of.setdefault(piece.source, []).append(piece)
        converted = [name for custom in recipe.customs for name in custom.sources]
        parts = self._stored.parts
        read = [name for n in pieces_of for name in parts.get(n, {n: n}).values()]
        self._total_bytes = sum(self._sources[name].num_bytes for name in (*read, *converted))
        self._report(0)
        plain = pieces_of.keys() - parts.keys()
        mapped = [name for name in plain if self._sources[name].offset is None]
        self._fill_ahead([self._sources[name] for name in plain.difference(mapped)], pieces_of)
        with Reader() as reader:
            for source in self._in_file_order(mapped):
                tensor = reader.read(source)
                self._put_pieces(pieces_of[source.name], whole_box(source.shape), tensor)
                self._report(source.num_bytes)
            for custom in recipe.customs:
                sources = self._in_file_order(custom.sources)
                tensors = {source.name: reader.read(source) for source in sources}
                for name, value in custom.convert(tensors).items():
                    self._put(name, whole_box(self._targets[name].shape), value)
                self._report(sum(source.num_bytes for source in sources))
            for weight in filter(parts.__contains__, pieces_of):
                self._put_stored(reader, weight, pieces_of[weight])

    def _put_stored(self, reader: Reader, weight: str, pieces: Sequence[TensorCopy]) -> None:
        """Read the parts of a weight that is stored quantized, and copy its rows into targets."""
        sources = {part: self._sources[name] for part, name in self._stored.parts[weight].items()}
        tensors = {part: reader.read(source) for part, source in sources.items()}
        stored = self._stored.decode(weight, tensors)
        for piece in pieces:
            rows = stored if len(piece.source_box) > 2 else stored[slice(*piece.source_box[0])]
            if len(piece.target_box) > len(piece.source_box):
                rows = rows[None]  # an expert's
            target = self._targets[piece.target]
            self._quantizer.put(piece.target, target, piece.target_box, rows)
            self.filled[piece.target] = self.filled.get(piece.target, 0) + rows.numel()
        self._report(sum(source.num_bytes for source in sources.values()))

    def _fill_ahead(
        self, sources: Sequence[Source], pieces_of: Mapping[str, Sequence[TensorCopy]]
    ) -> None:
        """Fill from sources with an offset in their file, read ahead in stretches."""
        gpus = {target.device for target in self._targets.values() if can_pin(target.device)}
        order = stretches(sources, STRETCH_BYTES)
        with closing(read_ahead(order, pinned=bool(gpus))) as buffers:
            for stretch, buffer in zip(order, buffers, strict=True):
                self._put_pieces(pieces_of[stretch.source.name], stretch.box, buffer.tensor())
                # The copies out of pinned memory are only issued here. Events mark their end: the
                # thread that fills this buffer next waits for the events, while this thread copies
                # the next stretch.
                buffer.wait = _copies_done(gpus)
                self._report(stretch.num_bytes)

    # A stretch and a piece are boxes of the same source. Their intersection is sliced from the
    # stretch, relative to its start, and copied to the matching part of the piece's target: a piece
    # of rows 40 to 80 and a stretch of rows 60 to 100 share rows 60 to 80, which are rows 0 to 20
    # of the stretch.
    def _put_pieces(self, pieces: Iterable[TensorCopy], box: Box, tensor: Tensor) -> None:
        """Copy a box of a source into the targets of all pieces that overlap the box."""
        for piece in pieces:
            part = piece.restrict(box)
            if part is not None:
                slices = tuple(
                    slice(start - first, stop - first)
                    for (start, stop), (first, _) in zip(part.source_box, box, strict=True)
                )
                self._put(part.target, part.target_box, part.orient(tensor[slices]))

    def _in_file_order(self, names: Iterable[str]) -> list[Source]:
        """Return sources sorted by file, and within a file in the order of its list of tensors."""
        places = {name: place for place, name in enumerate(self._sources)}
        ordered = sorted(names, key=lambda name: (self._sources[name].file, places[name]))
        return [self._sources[name] for name in ordered]

    def _put(self, name: str, box: Box, source: Tensor) -> None:
        """Copy a tensor into a box of a target, or quantize the tensor into a quantized target."""
        target = self._targets[name]
        extents = [stop - start for start, stop in box]
        if extents != list(source.shape):
            raise LoadError(f"{name}: {list(source.shape)} doesn't match {extents}")
        if is_composed(target):
            self._quantizer.put(name, target, box, source)
        else:
            copy_in_chunks(target[as_slices(box)], source)
        self.filled[name] = self.filled.get(name, 0) + source.numel()

    def _report(self, num_bytes: int) -> None:
        """Add bytes to the progress, and report it."""
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


def _copies_done(gpus: Iterable[torch.device]) -> Wait | None:
    """Return a function that waits for the copies issued so far; None without GPUs."""
    events: list[Any] = []
    for device in gpus:
        backend: Any = torch.get_device_module(device)
        events.append(backend.current_stream(device).record_event())

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait if events else None


def copy_in_chunks(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into another of the same shape with small temporary buffers.

    A copy out of pinned memory may go on after this function returns.
    """
    # A tensor with 8 rows of 4 MiB that changes its dtype is split until a part has at most 1 MiB:
    # first into its 8 rows, then each row into 4 parts.
    size = target.numel() * max(target.element_size(), source.element_size())
    is_plain = source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()
    if is_plain or size <= _CHUNK_BYTES or target.ndim == 0:
        target.copy_(source, non_blocking=True)
    elif len(target) == 1:
        copy_in_chunks(target[0], source[0])
    else:
        rows = max(1, _CHUNK_BYTES * len(target) // size)
        for start in range(0, len(target), rows):
            copy_in_chunks(target[start : start + rows], source[start : start + rows])


class Quantizer:
    """Fills quantized weights from boxes of unquantized ones, in any order.

    Experts on the host are quantized by `gpu`, which is many times as fast.
    """

    def __init__(self, gpu: torch.device | None = None) -> None:
        self._gpu = gpu
        # By name: rows gathered on the host, ranges of rows that were quantized without, and the
        # number of missing elements.
        self._gathered: dict[str, Tensor] = {}
        self._filled: dict[str, list[tuple[int, int]]] = {}
        self._missing: dict[str, int] = {}

    def put(self, name: str, target: Tensor, box: Box, source: Tensor | StoredRows) -> None:
        """Quantize a box of a weight, at once if possible, else once the weight is complete."""
        if isinstance(target, ExpertStack):
            (first, _), *inner = box
            if target.is_transposed:
                # In stored rows, columns come last already.
                inner, source = inner[::-1], getattr(source, "mT", source)
            for index in range(len(source)):
                place = f"{name}[{first + index}]"
                self._put_matrix(place, target.expert(first + index), inner, source[index])
        else:
            self._put_matrix(name, target, box, source)

    def _device_for(self, target: Tensor) -> torch.device:
        """Return the device that quantizes rows of a weight."""
        is_slow = isinstance(target, _QUANTIZED_BY_GPU) and not target.is_cuda
        return self._gpu if is_slow and self._gpu is not None else target.device

    def _put_matrix(
        self, name: str, target: Tensor, box: Sequence[Any], source: Tensor | StoredRows
    ) -> None:
        """Quantize a box [rows, columns] of a matrix."""
        (start, stop), columns = box
        if columns == (0, target.shape[1]) and takes_rows(target, start, stop):
            fill_rows(target, start, source, self._device_for(target))
            self._filled.setdefault(name, []).append((start, stop))
        else:
            assert isinstance(source, Tensor), "refused when the model is built"
            if name not in self._gathered:
                self._gathered[name] = torch.empty(target.shape, dtype=computes_in(target))
            self._gathered[name][start:stop, slice(*columns)] = source
        self._missing[name] = self._missing.get(name, target.numel()) - source.numel()
        if not self._missing[name]:
            self._finish(name, target)

    # Of a gate's 96 rows in a weight of 192, read in parts of 64, rows 0 to 64 can be quantized
    # alone. Rows 64 to 96 wait for those after them, and 64 to 192 are quantized together.
    def _finish(self, name: str, target: Tensor) -> None:
        """Quantize the gathered rows of a complete weight."""
        del self._missing[name]
        rows = self._gathered.pop(name, None)
        edge = 0
        for start, stop in (*sorted(self._filled.pop(name, [])), (target.shape[0], 0)):
            if rows is not None and edge < start:
                fill_rows(target, edge, rows[edge:start], self._device_for(target))
            edge = stop

"""Filling: boxes that are read from the files are copied into the model's tensors.

A tensor that the model has in another layout, a stack of experts for one, is never made on the
host: each box of it goes straight into its place. A weight in fewer bits is quantized there, a few
rows at a time; where a box isn't made of whole rows, or its rows don't lie as the layout takes
them, the weight is gathered on the host first.
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
from duoka.models.quantization import computes_in, fill_rows, is_composed, takes_rows

from ..devices import can_pin
from .read_ahead import STRETCH_BYTES, Wait, read_ahead, stretches
from .sources import Reader, Source

Progress = Callable[[int, int], None]
"""Called with the bytes done so far, and the bytes in all."""

# A copy that changes type or layout passes through a buffer of the tensor's size, on the host or
# on the device; so such copies are made in pieces of this size, which CUDA's allocator takes from
# small blocks: there may be no room for a large one beside the weights.
_CHUNK_BYTES = 2**20


class Filler:
    """Copies the sources of a recipe into a model's tensors, each on its device.

    `filled` counts the elements that were copied into each target.
    """

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
        converted = [name for custom in recipe.customs for name in custom.sources]
        self._total_bytes = sum(self._sources[n].num_bytes for n in (*pieces_of, *converted))
        self._report(0)
        mapped = [name for name in pieces_of if self._sources[name].offset is None]
        self._fill_ahead([self._sources[name] for name in pieces_of.keys() - mapped], pieces_of)
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

    def _fill_ahead(
        self, sources: Sequence[Source], pieces_of: Mapping[str, Sequence[TensorCopy]]
    ) -> None:
        gpus = {target.device for target in self._targets.values() if can_pin(target.device)}
        order = stretches(sources, STRETCH_BYTES)
        with closing(read_ahead(order, pinned=bool(gpus))) as buffers:
            for stretch, buffer in zip(order, buffers, strict=True):
                self._put_pieces(pieces_of[stretch.source.name], stretch.box, buffer.tensor())
                # The copies out of pinned memory have only been issued. Events mark their end; the
                # thread that fills this buffer next waits for them, while the next stretch is
                # copied here.
                buffer.wait = _copies_done(gpus)
                self._report(stretch.num_bytes)

    # A stretch and a piece are boxes of the same source. Their intersection, taken from the stretch
    # at its own origin, goes to the matching part of the piece's target: rows 40 to 80 of an expert
    # in a stretch of rows 60 to 100 are rows 60 to 80 there, which are rows 0 to 20 of the stretch.
    def _put_pieces(self, pieces: Iterable[TensorCopy], box: Box, tensor: Tensor) -> None:
        """Copy a box of a source into its place in each of the source's pieces."""
        for piece in pieces:
            part = piece.restrict(box)
            if part is not None:
                slices = tuple(
                    slice(start - first, stop - first)
                    for (start, stop), (first, _) in zip(part.source_box, box, strict=True)
                )
                self._put(part.target, part.target_box, part.orient(tensor[slices]))

    def _in_file_order(self, names: Iterable[str]) -> list[Source]:
        """Sort sources by file, and within a file as it lists its tensors."""
        places = {name: place for place, name in enumerate(self._sources)}
        ordered = sorted(names, key=lambda name: (self._sources[name].file, places[name]))
        return [self._sources[name] for name in ordered]

    def _put(self, name: str, box: Box, source: Tensor) -> None:
        """Copy a box into its place, or quantize it on the way there."""
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
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


def _copies_done(gpus: Iterable[torch.device]) -> Wait | None:
    """Return a function that waits for the copies issued so far; None without a GPU."""
    events: list[Any] = []
    for device in gpus:
        backend: Any = torch.get_device_module(device)
        events.append(backend.current_stream(device).record_event())

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait if events else None


def copy_in_chunks(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into another of its shape with little memory on the way.

    Out of pinned memory the copy may go on after this returns.
    """
    # A tensor [8, 4 MiB] that changes its type is split by rows until a piece has at most 1 MiB:
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
    """Fills quantized weights from boxes of the originals, in any order."""

    def __init__(self) -> None:
        # By name: weights of which only some boxes have come, and how many elements are missing.
        self._gathered: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}

    def put(self, name: str, target: Tensor, box: Box, source: Tensor) -> None:
        """Quantize a box of a weight."""
        (start, stop), columns = box
        if columns == (0, target.shape[1]) and takes_rows(target, start, stop):
            fill_rows(target, start, source)
            return
        if name not in self._gathered:
            self._gathered[name] = torch.empty(target.shape, dtype=computes_in(target))
            self._missing[name] = target.numel()
        self._gathered[name][as_slices(box)] = source
        self._missing[name] -= source.numel()
        if not self._missing[name]:
            fill_rows(target, 0, self._gathered.pop(name))

"""Reading ahead: boxes of tensors are read by a few threads into a few buffers, in file order.

A mapped file would be read page by page, as a single thread touches the pages. Here boxes are read
in the order of their bytes in the files, several at a time, while earlier boxes are copied to their
targets. Only the buffers are held in memory, whatever the model's size. Buffers for GPUs are
pinned, so that copies out of them go on while further boxes are read.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from duoka.base.files import open_regular
from duoka.errors import LoadError
from duoka.models.boxes import Box, whole_box

from .pickles import DAMAGED, damage_told
from .sources import Source, refuse_changed

Wait: TypeAlias = Callable[[], None]
"""Waits until nothing reads from a buffer any more."""

# A load takes 6 * 16 MiB of the host's memory, whatever the model's size: four stretches are read
# at a time, the caller copies out of a fifth, and the sixth is full or waits for copies out of it.
STRETCH_BYTES = 16 * 2**20
_MOST_THREADS = 4
_BUFFERS = 6


@dataclass(frozen=True, slots=True)
class Stretch:
    """A box of one tensor whose bytes are contiguous in its file."""

    source: Source
    box: Box
    offset: int
    num_bytes: int


@dataclass(slots=True)
class StretchBuffer:
    """A host buffer with a stretch; `wait` waits for copies out of the buffer, None for none."""

    bytes: Tensor
    stretch: Stretch | None = None
    wait: Wait | None = None

    def tensor(self) -> Tensor:
        """Return the box as a tensor, valid until the caller requests the next stretch."""
        assert self.stretch is not None, "it has been read"
        raw = self.bytes[: self.stretch.num_bytes].view(self.stretch.source.dtype)
        return raw.view([stop - start for start, stop in self.stretch.box])


def stretches(sources: Iterable[Source], most_bytes: int) -> list[Stretch]:
    """Split tensors into stretches of at most `most_bytes`, in the order of files and offsets."""
    ordered = sorted(sources, key=lambda source: (source.file, source.offset or 0))
    return [stretch for source in ordered for stretch in _split(source, most_bytes)]


def _split(source: Source, most_bytes: int) -> Iterator[Stretch]:
    """Yield stretches of at most `most_bytes`: whole inner dimensions, and a range of an outer one.

    A [3, 8, 4] tensor of 1-byte numbers, with at most 20 bytes: rows of 4 bytes are contiguous, and
    5 of 8 fit, so the boxes are [0:1, 0:5, 0:4], [0:1, 5:8, 0:4], [1:2, 0:5, 0:4], …
    """
    assert source.offset is not None, "tensors without a place in their file are read otherwise"
    inner, depth = source.dtype.itemsize, len(source.shape)
    while depth and inner * source.shape[depth - 1] <= most_bytes:
        depth -= 1
        inner *= source.shape[depth]
    whole = whole_box(source.shape)
    if not depth or not inner:
        yield Stretch(source, whole, source.offset, source.num_bytes)
        return
    depth -= 1
    step = max(1, most_bytes // inner)
    offset = source.offset
    for leading in product(*(range(extent) for extent in source.shape[:depth])):
        for start in range(0, source.shape[depth], step):
            stop = min(start + step, source.shape[depth])
            box = (*((index, index + 1) for index in leading), (start, stop), *whole[depth + 1 :])
            yield Stretch(source, box, offset, (stop - start) * inner)
            offset += (stop - start) * inner


def read_ahead(order: Sequence[Stretch], *, pinned: bool) -> Generator[StretchBuffer]:
    """Yield the stretches in order while further stretches are read.

    Close the generator if it isn't exhausted. A buffer is refilled after its `wait`.
    """
    # Six buffers are reused in turn: while the caller has b0, b1 to b5 are being read, or are full.
    # When the caller requests the next buffer, b0 is queued after b5 with the next stretch; the
    # thread that fills b0 first waits until the copies out of b0 are done.
    with ExitStack() as stack:
        files = {s.source.file: s.source.stamp for s in order}
        descriptors = {file: stack.enter_context(_open_file(file)) for file in files}
        threads = max(1, min(_MOST_THREADS, os.cpu_count() or 1))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="duoka-load")
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        size = max((stretch.num_bytes for stretch in order), default=0)
        in_flight: deque[Future[StretchBuffer]] = deque()
        waiting = iter(order)

        def begin(buffer: StretchBuffer) -> None:
            stretch = next(waiting, None)
            if stretch is not None:
                descriptor = descriptors[stretch.source.file]
                in_flight.append(pool.submit(_read, descriptor, stretch, buffer))

        for _ in range(min(_BUFFERS, len(order))):
            begin(StretchBuffer(torch.empty(size, dtype=torch.uint8, pin_memory=pinned)))
        while in_flight:
            buffer = in_flight.popleft().result()
            yield buffer
            begin(buffer)
        for file, stamp in files.items():
            refuse_changed(file, stamp)


def _read(descriptor: int, stretch: Stretch, buffer: StretchBuffer) -> StretchBuffer:
    """Read a stretch into a buffer, after the copies out of the buffer are done."""
    if buffer.wait is not None:
        buffer.wait()
    file = stretch.source.file
    refuse_changed(file, stretch.source.stamp)
    view: Any = buffer.bytes.numpy()[: stretch.num_bytes]
    done = 0
    with damage_told(file):
        while done < stretch.num_bytes:
            got = os.preadv(descriptor, [view[done:]], stretch.offset + done)
            if not got:
                refuse_changed(file, stretch.source.stamp)
                raise LoadError(f"{file} is truncated", hint=DAMAGED)
            done += got
    buffer.stretch, buffer.wait = stretch, None
    return buffer


@contextmanager
def _open_file(file: Path) -> Iterator[int]:
    """Open a regular file inside the scope; yield its descriptor."""
    with damage_told(file):
        opened = open_regular(file)
    with opened:
        yield opened.fileno()

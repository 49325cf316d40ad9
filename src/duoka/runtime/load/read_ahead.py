"""Reading ahead: stretches of files, read by a few threads into a few buffers, given in order.

What is mapped from a file comes page by page, as it is touched, by one thread. Here large stretches
are read in the order in which they lie on the disk, several at a time, while what was read before
is copied into its place. No more than the buffers are held, whatever the model's size; they are
pinned where a GPU takes from them, so that a copy goes on while the next one is read.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from duoka.models.boxes import Box

from .sources import DAMAGED, Source, damage_told, refuse_changed

Wait: TypeAlias = Callable[[], None]
"""Waits until nothing reads from a buffer any more."""

STRETCH_BYTES = 16 * 2**20
_MOST_THREADS = 4
_BUFFERS = 6


@dataclass(frozen=True, slots=True)
class StretchPart:
    """A box of one tensor, and where its bytes begin in a stretch."""

    source: Source
    box: Box
    start: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of bytes of one file, and what it holds."""

    file: Path
    offset: int
    num_bytes: int
    parts: tuple[StretchPart, ...]


@dataclass(slots=True)
class Filled:
    """A stretch in a buffer; `wait`, where it is set, says when that may be used again."""

    stretch: Stretch
    buffer: Tensor
    wait: Wait | None = None

    def tensors(self) -> Iterator[tuple[StretchPart, Tensor]]:
        """Each part as a tensor of its box's extents, on the host, valid until the next stretch."""
        for part in self.stretch.parts:
            extents = [stop - start for start, stop in part.box]
            size = part.source.dtype.itemsize
            for extent in extents:
                size *= extent
            raw = self.buffer[part.start : part.start + size]
            yield part, raw.view(part.source.dtype).view(extents)


def stretches(sources: Iterable[Source], most_bytes: int) -> list[Stretch]:
    """Deal tensors to stretches, in the order in which they lie in their files.

    Small neighbours share one, large tensors take several; each part is a box whose elements lie
    side by side.
    """
    result: list[Stretch] = []
    ordered = sorted(sources, key=lambda source: (source.file, source.offset or 0))
    for source in ordered:
        for box, offset, size in _boxes(source, most_bytes):
            last = result[-1] if result else None
            begun = last is not None and last.file == source.file
            if (
                last is not None
                and begun
                and last.offset + last.num_bytes == offset
                and last.num_bytes + size <= most_bytes
                and last.num_bytes % source.dtype.itemsize == 0
            ):
                part = StretchPart(source, box, last.num_bytes)
                grown = (*last.parts, part)
                result[-1] = Stretch(last.file, last.offset, last.num_bytes + size, grown)
            else:
                result.append(Stretch(source.file, offset, size, (StretchPart(source, box, 0),)))
    return result


def _boxes(source: Source, most_bytes: int) -> Iterator[tuple[Box, int, int]]:
    """Boxes of at most so many bytes that lie side by side in the file, with offset and bytes."""
    assert source.offset is not None, "tensors without a place in their file are read otherwise"
    inner, depth = source.dtype.itemsize, len(source.shape)
    while depth and inner * source.shape[depth - 1] <= most_bytes:
        depth -= 1
        inner *= source.shape[depth]
    whole = tuple((0, extent) for extent in source.shape)
    if not depth or not inner:
        yield whole, source.offset, source.num_bytes
        return
    depth -= 1
    step = max(1, most_bytes // inner)
    offset = source.offset
    for leading in product(*(range(extent) for extent in source.shape[:depth])):
        for start in range(0, source.shape[depth], step):
            stop = min(start + step, source.shape[depth])
            ends = (*((index, index + 1) for index in leading), (start, stop), *whole[depth + 1 :])
            yield ends, offset, (stop - start) * inner
            offset += (stop - start) * inner


@contextmanager
def read_ahead(order: Sequence[Stretch], *, pinned: bool) -> Iterator[Iterator[Filled]]:
    """Give the stretches one after another while those that follow are read."""
    with ExitStack() as stack:
        files = {file: stack.enter_context(_opened(file)) for file in {s.file for s in order}}
        threads = max(1, min(_MOST_THREADS, os.cpu_count() or 1))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="duoka-load")
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        size = max((stretch.num_bytes for stretch in order), default=0)
        num_buffers = min(_BUFFERS, len(order))
        free: deque[tuple[Tensor, Wait | None]] = deque(
            (torch.empty(size, dtype=torch.uint8, pin_memory=pinned), None)
            for _ in range(num_buffers)
        )
        yield _stretch_data(order, files, pool, free)
        for stretch in {stretch.file: stretch for stretch in order}.values():
            refuse_changed(stretch.file, stretch.parts[0].source.stamp)


def _stretch_data(
    order: Sequence[Stretch],
    files: dict[Path, int],
    pool: ThreadPoolExecutor,
    free: deque[tuple[Tensor, Wait | None]],
) -> Iterator[Filled]:
    under_way: deque[Future[Filled]] = deque()
    waiting = iter(order)

    def begin() -> None:
        stretch = next(waiting, None)
        if stretch is not None:
            buffer, wait = free.popleft()
            under_way.append(pool.submit(_read, files[stretch.file], stretch, buffer, wait))

    for _ in range(len(free)):
        begin()
    while under_way:
        filled = under_way.popleft().result()
        yield filled
        free.append((filled.buffer, filled.wait))
        begin()


def _read(descriptor: int, stretch: Stretch, buffer: Tensor, wait: Wait | None) -> Filled:
    if wait is not None:
        wait()
    refuse_changed(stretch.file, stretch.parts[0].source.stamp)
    view: Any = buffer.numpy()[: stretch.num_bytes]
    done = 0
    with damage_told(stretch.file):
        while done < stretch.num_bytes:
            got = os.preadv(descriptor, [view[done:]], stretch.offset + done)
            if not got:
                raise LoadError(f"{stretch.file} is cut off", hint=DAMAGED)
            done += got
    return Filled(stretch, buffer)


@contextmanager
def _opened(file: Path) -> Iterator[int]:
    with damage_told(file):
        opened = open_regular(file)
    with opened:
        yield opened.fileno()

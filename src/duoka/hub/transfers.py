"""Transfers: one file from the Hub into the cache, whole and right or not at all.

What has arrived lies in ``blobs/ETAG.incomplete`` and is gone on with, by whichever process comes
next. It gets its name in the cache after its hash was found right, and not before.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from huggingface_hub import hf_hub_url

from duoka.errors import CheckpointError

from .answers import Passing
from .listings import Digest, RemoteFile
from .names import Wanted
from .places import endpoint, raw_endpoint
from .web import NoRanges, broken, check_range, persist, request

_CHUNK_BYTES = 2**20

Moved = Callable[[int], None]
"""Called with the bytes of a file that are there so far."""


def transfer(wanted: Wanted, file: RemoteFile, blob: Path, moved: Moved) -> None:
    """Download a file.

    Parameters
    ----------
    wanted : Wanted
        With the commit as revision.
    file : RemoteFile
    blob : Path
        Where it is to lie.
    moved : callable
        Called with the bytes that are there so far.

    Raises
    ------
    CheckpointError
        If it can't be had, or its hash is wrong; then nothing of it stays.
    """
    incomplete = blob.with_name(f"{blob.name}.incomplete")
    with _alone(incomplete) as opened:
        if blob.exists():  # another process was quicker
            return
        part = _Part(wanted, file, opened, moved)
        persist(part.go_on, moved=lambda: part.num_bytes)
        if part.digest.hexdigest() != file.etag:
            incomplete.unlink()
            raise CheckpointError(
                f"{wanted} has arrived with another content than {endpoint()} told of; it was "
                "removed",
                hint="run the command again; if it happens again, the file on the Hub is damaged",
            )
        opened.flush()
        os.fsync(opened.fileno())
        incomplete.replace(blob)


@contextmanager
def _alone(path: Path) -> Iterator[BinaryIO]:
    """Open an unfinished file that no other process writes; wait for the one that does."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        with os.fdopen(handle, "r+b") as opened:
            with suppress(OSError):  # a file system without locks: the hash will tell
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_still(path, handle):
                yield opened
                return


def _is_still(path: Path, handle: int) -> bool:
    """Whether the path leads to the open file: who had the lock before may have renamed it."""
    try:
        return path.stat().st_ino == os.fstat(handle).st_ino
    except FileNotFoundError:
        return False


class _Part:
    """What has arrived of a file."""

    def __init__(self, wanted: Wanted, file: RemoteFile, opened: BinaryIO, moved: Moved) -> None:
        self.num_bytes = 0
        self.digest: Digest = file.digest()
        self._wanted = wanted
        self._file = file
        self._opened = opened
        self._moved = moved
        self._url = hf_hub_url(
            wanted.name.repo,
            file.name,
            revision=wanted.name.revision,
            endpoint=raw_endpoint(),
        )
        self._take_over()

    def go_on(self) -> None:
        """Ask for what is missing.

        Raises
        ------
        Passing
            If it breaks off.
        """
        if self.num_bytes == self._file.num_bytes:
            return
        try:
            with request(self._url, self._wanted, start=self.num_bytes) as response:
                check_range(response, self._wanted, self.num_bytes, self._file.num_bytes)
                for chunk in response.iter_raw():
                    self._add(chunk)
        except NoRanges as error:
            self._begin_again()
            raise Passing(error, wait_seconds=0) from error
        finally:
            self._opened.flush()
        if self.num_bytes < self._file.num_bytes:
            raise Passing(broken(self._wanted))

    def _take_over(self) -> None:
        """Count what an earlier attempt left."""
        if os.fstat(self._opened.fileno()).st_size > self._file.num_bytes:
            self._begin_again()
        while chunk := self._opened.read(_CHUNK_BYTES):
            self.digest.update(chunk)
            self.num_bytes += len(chunk)
        self._moved(self.num_bytes)

    def _begin_again(self) -> None:
        self._opened.seek(0)
        self._opened.truncate()
        self.num_bytes, self.digest = 0, self._file.digest()

    def _add(self, chunk: bytes) -> None:
        if self.num_bytes + len(chunk) > self._file.num_bytes:
            self._begin_again()
            raise CheckpointError(
                f"{endpoint()} sends more of {self._wanted} than the "
                f"{self._file.num_bytes} bytes that it told of"
            )
        self._opened.write(chunk)
        self.digest.update(chunk)
        self.num_bytes += len(chunk)
        self._moved(self.num_bytes)

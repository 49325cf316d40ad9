"""Store: huggingface_hub's cache on disk, which duoka shares with every other program.

In ``models--org--name`` lie ``blobs/ETAG``, the contents; ``snapshots/COMMIT/FILE``, links to them;
and ``refs/REVISION``, which commit a branch or tag was. What is in it was put there by anybody: a
content counts when its size and its hash are right, and that they are is remembered.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from huggingface_hub import constants

from duoka.files import Stamp, cache_directory, open_regular, read_text, write_whole
from duoka.folders import is_inside

from .listings import Listing, RemoteFile
from .names import COMMIT

_CHUNK_BYTES = 2**22


class Store:
    """The part of the cache that belongs to one repository.

    Parameters
    ----------
    repo : str
    """

    def __init__(self, repo: str) -> None:
        self.root = Path(constants.HF_HUB_CACHE).expanduser() / "--".join(
            ["models", *repo.split("/")]
        )

    def snapshot(self, commit: str) -> Path:
        """The directory of one commit."""
        return self.root / "snapshots" / commit

    def blob(self, file: RemoteFile) -> Path:
        """Where a content lies, or will lie."""
        return self.root / "blobs" / file.etag

    def find(self, commit: str, file: RemoteFile) -> Path | None:
        """A file of a commit, if it is here and has the right length."""
        for place in (self.snapshot(commit) / file.name, self.blob(file)):
            with suppress(OSError):
                status = place.stat()
                right = stat.S_ISREG(status.st_mode) and status.st_size == file.num_bytes
                if right and is_inside(place, self.snapshot(commit)):
                    return place
        return None

    def remaining_bytes(self, file: RemoteFile) -> int:
        """How much of a file has yet to arrive."""
        arrived = 0
        with suppress(OSError):
            arrived = self.blob(file).with_name(f"{file.etag}.incomplete").stat().st_size
        return max(0, file.num_bytes - arrived)

    def free_bytes(self) -> int:
        """What is free on the disk that holds the cache, or will hold it."""
        for place in (self.root, *self.root.parents):
            with suppress(OSError):
                return shutil.disk_usage(place).free
        return 0

    def commit_of(self, revision: str) -> str | None:
        """Which commit a revision was when it was last asked for."""
        if COMMIT.fullmatch(revision):
            return revision
        try:
            commit = read_text(self.root / "refs" / revision, most_bytes=100).strip()
        except (OSError, ValueError):
            return None
        return commit if COMMIT.fullmatch(commit) else None

    def keep_commit(self, revision: str, commit: str) -> None:
        """Remember which commit a revision is. That it can't be kept is no reason to fail."""
        path = self.root / "refs" / revision
        if revision == commit or self.commit_of(revision) == commit:
            return
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, commit)

    def link(self, commit: str, file: RemoteFile) -> None:
        """Let a commit's directory show a content that is there."""
        pointer, blob = self.snapshot(commit) / file.name, self.blob(file)
        if self.find(commit, file) == pointer:
            return
        pointer.parent.mkdir(parents=True, exist_ok=True)
        # Made under another name, and renamed: at no moment another process finds it gone.
        link = pointer.with_name(f".{pointer.name}.{secrets.token_hex(4)}.link")
        try:
            link.symlink_to(os.path.relpath(blob, pointer.parent))
            link.replace(pointer)
        except OSError:  # a file system without links
            blob.replace(pointer)
        finally:
            link.unlink(missing_ok=True)

    def drop_other_length(self, file: RemoteFile) -> None:
        """Remove a content that is longer or shorter than it should be."""
        with suppress(OSError):
            if self.blob(file).stat().st_size != file.num_bytes:
                self.blob(file).unlink()

    def drop(self, commit: str, file: RemoteFile) -> None:
        """Remove a content that isn't what it should be."""
        for path in (self.snapshot(commit) / file.name, self.blob(file)):
            with suppress(OSError):
                path.unlink()

    def local_listing(self, commit: str) -> Listing | None:
        """What of a commit is there, by the names of its contents; None if nothing is."""
        files: dict[str, RemoteFile] = {}
        with suppress(OSError):
            for pointer in self.snapshot(commit).iterdir():
                etag = pointer.resolve().name
                files[pointer.name] = RemoteFile(
                    name=pointer.name,
                    num_bytes=pointer.stat().st_size,
                    sha256=etag if len(etag) == 64 else None,
                    git_sha1=etag if len(etag) == 40 else None,
                )
        return Listing(commit=commit, files=files) if files else None


def is_verified(path: Path, file: RemoteFile) -> bool:
    """Whether this very file was found right before."""
    try:
        return _mark(path, file).exists()
    except OSError:
        return False


def remember(path: Path, file: RemoteFile) -> None:
    """Remember that a file is right, as long as nobody touches it."""
    with suppress(OSError):
        mark = _mark(path, file)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def has_right_hash(path: Path, file: RemoteFile) -> bool:
    """Read a file and compare its hash; a file whose hash nobody told is taken as it is.

    Raises
    ------
    OSError, ValueError
        If it can't be read.
    """
    if not file.etag:
        return True
    digest = file.digest()
    with open_regular(path) as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == file.etag


def _mark(path: Path, file: RemoteFile) -> Path:
    stamp = Stamp.of(path.stat())
    key = hashlib.sha256(repr((str(path.resolve()), tuple(stamp), file.etag)).encode())
    return cache_directory() / "verified" / key.hexdigest()

"""Hashes: whether a downloaded file is what the Hub told of; once found right, it is remembered.

huggingface_hub compares lengths; a file that another program put into its cache, or that a proxy
spoilt, is found here.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from duoka.base.files import Stamp, cache_directory, open_regular

from .listing import RemoteFile

_CHUNK_BYTES = 2**22
_SHA256_LENGTH = 64


def is_right(path: Path, file: RemoteFile) -> bool:
    """Whether a file has the content that it should have; read only if it changed since.

    A file whose hash nobody told is taken as it is.
    """
    if not file.etag:
        return True
    mark = _mark(path, file)
    if mark.exists():
        return True
    if not has_right_hash(path, file):
        return False
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return True


def has_right_hash(path: Path, file: RemoteFile) -> bool:
    """Read a file and compare its hash."""
    if len(file.etag) == _SHA256_LENGTH:
        digest = hashlib.sha256()
    else:
        # Git's name of a content: not a proof against attackers, but against accidents.
        digest = hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)
    with open_regular(path) as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest() == file.etag


def _mark(path: Path, file: RemoteFile) -> Path:
    stamp = Stamp.of(path.stat())
    key = hashlib.sha256(repr((str(path.resolve()), tuple(stamp), file.etag)).encode())
    return cache_directory() / "verified" / key.hexdigest()

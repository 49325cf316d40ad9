"""Listing: the files of a repository at one commit, as the Hub's API tells them, and their hashes.

huggingface_hub compares lengths; a file that another program put into its cache, or that a proxy
spoilt, is found by its hash. That it was right is remembered.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import HfApi, constants

from duoka.base.files import Stamp, cache_directory, open_regular, read_bytes, write_whole
from duoka.errors import CheckpointError

from ..directory import CHAT_TEMPLATES
from ..headers import is_plain_name, parse_json
from .errors import ask, endpoint
from .repo_name import COMMIT, HubName, Wanted

_MOST_BYTES = 32 * 2**20
_NO_HUB = "is HF_ENDPOINT the address of a Hub?"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")
_CHUNK_BYTES = 2**22
_SHA256_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of a repository.

    `etag` is what the Hub, and its cache, call the content: its sha256 for files in large-file
    storage, git's name of it for all others.
    """

    name: str
    num_bytes: int
    etag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a repository holds at one commit."""

    commit: str
    files: Mapping[str, RemoteFile]


def ask_listing(name: HubName) -> Listing:
    """Ask the Hub what a repository holds, and keep the answer: a commit never changes."""
    api = HfApi(library_name="duoka")

    info = ask(
        Wanted(name=name),
        lambda: api.model_info(
            name.repo,
            revision=name.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        ),
    )
    siblings = (
        (sibling.rfilename, sibling.size, sibling.lfs.sha256 if sibling.lfs else sibling.blob_id)
        for sibling in info.siblings or ()
    )
    listing = _listing(info.sha, siblings, name)
    for revision in {name.revision, listing.commit}:
        _keep(name.repo, revision, listing)
    return listing


def kept_listing(name: HubName) -> Listing | None:
    """What was told of a revision before; None if nothing was, or it can't be read."""
    path = _path(name.repo, name.revision)
    try:
        content = parse_json(read_bytes(path, most_bytes=_MOST_BYTES), str(path))
        return _listing(content["commit"], content["files"], name)
    except (OSError, ValueError, KeyError, TypeError, CheckpointError):
        return None


def _path(repo: str, revision: str) -> Path:
    names = (quote(part, safe="") for part in (repo, f"{revision}.json"))
    return cache_directory().joinpath("hub", *names)


def _keep(repo: str, revision: str, listing: Listing) -> None:
    files = [(file.name, file.num_bytes, file.etag) for file in listing.files.values()]
    path = _path(repo, revision)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"commit": listing.commit, "files": files}))
    except OSError:  # asked again next time
        return


def _listing(commit: object, files: Iterable[Any], name: HubName) -> Listing:
    if not (isinstance(commit, str) and COMMIT.fullmatch(commit)):
        raise CheckpointError(
            f"{endpoint()} doesn't tell the commit of {name}",
            hint=_NO_HUB,
        )
    if COMMIT.fullmatch(name.revision) and commit != name.revision:
        raise CheckpointError(
            f"{endpoint()} tells of commit {commit} instead of {name}", hint=_NO_HUB
        )
    return Listing(commit=commit, files={file.name: file for file in _files(files)})


def _files(files: Iterable[Any]) -> Iterator[RemoteFile]:
    """Those that can belong to a checkpoint; what else there is doesn't matter."""
    for file, size, etag in files:
        known = isinstance(etag, str) and (_SHA256.fullmatch(etag) or _SHA1.fullmatch(etag))
        if _is_name(file) and type(size) is int and 0 <= size < 2**63 and known:
            yield RemoteFile(name=file, num_bytes=size, etag=etag)


def _is_name(name: object) -> bool:
    if not isinstance(name, str):
        return False
    folder, _, plain = name.rpartition("/")
    return is_plain_name(plain) and folder in ("", CHAT_TEMPLATES)


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

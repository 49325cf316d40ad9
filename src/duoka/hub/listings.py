"""Listings: the files of a repository at one commit, as the Hub's API tells them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote

from duoka.errors import CheckpointError
from duoka.files import cache_directory, read_bytes, write_whole
from duoka.folders import CHAT_TEMPLATES
from duoka.headers import is_plain_name, parse_json

from .names import COMMIT, HubName, Wanted
from .places import api_url, endpoint
from .web import read_small

_MOST_BYTES = 32 * 2**20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHA1 = re.compile(r"[0-9a-f]{40}")


class Digest(Protocol):
    """What `hashlib` makes."""

    def update(self, data: bytes, /) -> None:
        """Take more bytes."""

    def hexdigest(self) -> str:
        """The hash of all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of a repository.

    Parameters
    ----------
    name : str
    num_bytes : int
    sha256 : str or None
        Of the content, for files in large-file storage.
    git_sha1 : str or None
        Git's name of the content, for all others.
    """

    name: str
    num_bytes: int
    sha256: str | None
    git_sha1: str | None

    @property
    def etag(self) -> str:
        """What the Hub, and its cache, call the content."""
        return self.sha256 or self.git_sha1 or ""

    def digest(self) -> Digest:
        """A hash to be fed the content; `is_right` takes its result."""
        if self.sha256 is not None:
            return hashlib.sha256()
        # Git's name of a content: not a proof against attackers, but against accidents.
        return hashlib.sha1(b"blob %d\0" % self.num_bytes, usedforsecurity=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a repository holds at one commit."""

    commit: str
    files: Mapping[str, RemoteFile]


def ask_listing(name: HubName) -> Listing:
    """Ask the Hub what a repository holds, and keep the answer: a commit never changes.

    Raises
    ------
    CheckpointError
    """
    wanted = Wanted(name=name)
    url = api_url(f"models/{name.repo}/revision/{quote(name.revision, safe='')}?blobs=true")
    content = read_small(url, wanted, most_bytes=_MOST_BYTES)
    listing = _parse(content, name)
    if COMMIT.fullmatch(name.revision) and listing.commit != name.revision:
        raise CheckpointError(f"{endpoint()} tells of commit {listing.commit} instead of {name}")
    _keep(name.repo, listing)
    return listing


def kept_listing(repo: str, commit: str) -> Listing | None:
    """What was told of a commit before; None if nothing was, or it can't be read."""
    name = HubName(repo=repo, revision=commit)
    try:
        listing = _parse(read_bytes(_path(repo, commit), most_bytes=_MOST_BYTES), name)
    except (OSError, ValueError, CheckpointError):
        return None
    return listing if listing.commit == commit else None


def _path(repo: str, commit: str) -> Any:
    return cache_directory() / "hub" / repo.replace("/", "--") / f"{commit}.json"


def _keep(repo: str, listing: Listing) -> None:
    siblings = [
        {
            "rfilename": file.name,
            "size": file.num_bytes,
            "blobId": file.git_sha1,
            "lfs": {"sha256": file.sha256} if file.sha256 else None,
        }
        for file in listing.files.values()
    ]
    path = _path(repo, listing.commit)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"sha": listing.commit, "siblings": siblings}))
    except OSError:  # asked again next time
        return


def _parse(content: bytes, name: HubName) -> Listing:
    if content.lstrip()[:1] == b"<":
        raise CheckpointError(
            f"{endpoint()} answers with a web page instead of data about {name}",
            hint="is HF_ENDPOINT the address of a Hub, or does a network log-in page answer?",
        )
    told = parse_json(content, f"what {endpoint()} tells about {name}")
    commit, siblings = told.get("sha"), told.get("siblings")
    if not (isinstance(commit, str) and COMMIT.fullmatch(commit) and isinstance(siblings, list)):
        raise CheckpointError(
            f"{endpoint()} tells neither commit nor files of {name}",
            hint="is HF_ENDPOINT the address of a Hub?",
        )
    return Listing(commit=commit, files={file.name: file for file in _files(siblings)})


def _files(siblings: list[object]) -> Iterator[RemoteFile]:
    """Those files that can belong to a checkpoint; what else there is doesn't matter."""
    for sibling in siblings:
        if not isinstance(sibling, dict) or not _is_name(sibling.get("rfilename")):
            continue
        lfs = sibling.get("lfs")
        sha256 = lfs.get("sha256") if isinstance(lfs, dict) else None
        git_sha1, size = sibling.get("blobId"), sibling.get("size")
        sha256 = sha256 if isinstance(sha256, str) and _SHA256.fullmatch(sha256) else None
        git_sha1 = git_sha1 if isinstance(git_sha1, str) and _SHA1.fullmatch(git_sha1) else None
        if type(size) is int and 0 <= size < 2**63 and (sha256 or git_sha1):
            yield RemoteFile(
                name=sibling["rfilename"],
                num_bytes=size,
                sha256=sha256,
                git_sha1=None if sha256 else git_sha1,
            )


def _is_name(name: object) -> bool:
    if not isinstance(name, str):
        return False
    folder, _, plain = name.rpartition("/")
    return is_plain_name(plain) and folder in ("", CHAT_TEMPLATES)

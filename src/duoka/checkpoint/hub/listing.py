"""List a repository's files at a commit with their hashes, and verify hashes.

huggingface_hub compares lengths only. The hash detects a file that another program put into its
cache, or that a proxy damaged. A successful comparison leaves a marker file in duoka's cache, named
after path, stamp and hash, so that the file is not read again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from huggingface_hub import HfApi, constants

from duoka.base.files import Stamp, cache_directory, keep, open_regular, read_text
from duoka.base.serialization import from_dict, parse_json_object, to_dict
from duoka.errors import CheckpointError, FormatError

from ..directory import CHAT_TEMPLATES
from ..headers import is_plain_name
from .errors import endpoint, query
from .repo_name import COMMIT, HubName

_MOST_BYTES = 32 * 2**20
_ETAG = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}|")

_SHA256_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of a repository; `etag` is its sha256, or git's sha1 of a small file, or ""."""

    name: str
    num_bytes: int
    etag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of a repository at one commit, by name."""

    commit: str
    files: Mapping[str, RemoteFile]


# A listing is of one commit, which never changes. It is stored twice: under the commit, where it is
# valid forever, and under the requested branch or tag, where it is used if HF_HUB_OFFLINE is set.
def query_listing(name: HubName) -> Listing:
    """Query the Hub for a repository's files, and store the listing in duoka's cache."""
    info = query(
        name,
        lambda: HfApi(library_name="duoka").model_info(
            name.repo,
            revision=name.revision,
            files_metadata=True,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
        ),
    )
    commit = str(info.sha)
    is_other = COMMIT.fullmatch(name.revision) and commit != name.revision
    if is_other or not COMMIT.fullmatch(commit):
        hint = "check that HF_ENDPOINT is the URL of a Hub"
        raise CheckpointError(f"{endpoint()} doesn't report the commit of {name}", hint=hint)
    files = {file.name: file for file in _select_files(info.siblings or ())}
    return keep_listing(name, Listing(commit=commit, files=files))


def keep_listing(name: HubName, listing: Listing) -> Listing:
    """Store a listing in duoka's cache, and return it."""
    for revision in {name.revision, listing.commit}:
        # If this fails, the server is queried again the next time.
        keep(_listing_path(name, revision), json.dumps(to_dict(listing)))
    return listing


def kept_listing(name: HubName) -> Listing | None:
    """Return the stored listing of a revision; None if there is none, or it is damaged."""
    path = _listing_path(name, name.revision)
    try:
        text = read_text(path, most_bytes=_MOST_BYTES)
        return from_dict(Listing, parse_json_object(text, str(path)))
    except (OSError, ValueError, FormatError):
        return None


def _listing_path(name: HubName, revision: str) -> Path:
    """Return the path of a stored listing."""
    repository = quote(f"{name.site}{name.repo}", safe="")
    return cache_directory() / "hub" / repository / quote(f"{revision}.json", safe="")


def _select_files(siblings: Iterable[Any]) -> Iterator[RemoteFile]:
    """Yield the files of the Hub's answer that belong to a checkpoint and have a size and hash."""
    for sibling in siblings:
        etag = str(sibling.lfs.sha256 if sibling.lfs else sibling.blob_id)
        if file := make_file(str(sibling.rfilename), sibling.size, etag):
            yield file


def make_file(name: str, num_bytes: object, etag: str) -> RemoteFile | None:
    """Make a file of a checkpoint; None if it isn't one, or its size is unknown."""
    folder, _, plain = name.rpartition("/")
    is_named = is_plain_name(plain) and folder in ("", CHAT_TEMPLATES)
    if type(num_bytes) is not int or not 0 <= num_bytes < 2**63:
        return None
    if not is_named or not _ETAG.fullmatch(etag):
        return None
    return RemoteFile(name=name, num_bytes=num_bytes, etag=etag)


def has_known_hash(path: Path, file: RemoteFile) -> bool:
    """Return True if a file's content has the listed hash; read the file only if it changed.

    A file without a listed hash is accepted.
    """
    if not file.etag:
        return True
    stamp = Stamp.of(path.stat())
    key = hashlib.sha256(repr((str(path.resolve()), tuple(stamp), file.etag)).encode())
    marker = cache_directory() / "verified" / key.hexdigest()
    is_right = marker.exists() or has_right_hash(path, file)
    if is_right:
        keep(marker, "")
    return is_right


def has_right_hash(path: Path, file: RemoteFile) -> bool:
    """Read a file and return True if it has the listed hash."""
    # Git's sha1 of a blob doesn't detect forgery, but it detects damage.
    blob = hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)
    with open_regular(path) as opened:
        is_sha256 = len(file.etag) == _SHA256_LENGTH
        digest = hashlib.file_digest(opened, hashlib.sha256 if is_sha256 else lambda: blob)
    return digest.hexdigest() == file.etag

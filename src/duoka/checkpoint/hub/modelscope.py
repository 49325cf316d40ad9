"""Repositories on ModelScope, through its own client, modelscope_hub, which need not be installed.

The client determines the address, the token and the cache (MODELSCOPE_ENDPOINT,
MODELSCOPE_API_TOKEN or a login, MODELSCOPE_CACHE). ModelScope doesn't report the commit of a
branch, and the client's cache has a directory for each revision. A file of a branch that has moved
is recognized by its hash, which the listing contains.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from modelscope_hub import HubApi
from modelscope_hub.config import HubConfig
from modelscope_hub.errors import CacheNotFound, FileIntegrityError, HubError

from duoka.base.web import http
from duoka.errors import CheckpointError

from .errors import MESSAGES, choose_message, query, without_password
from .listing import Listing, RemoteFile, keep_listing, make_file
from .repo_name import HubName
from .snapshot import FIRST_BYTES, HubSnapshot, find_listing, progress_class, read_range

T = TypeVar("T")

_MODEL = "model"  # the other kinds of repositories are datasets and studios


class ModelScopeSnapshot(HubSnapshot):
    """A repository on ModelScope at one revision."""

    cache_variable = "MODELSCOPE_CACHE"

    def __init__(self, name: HubName) -> None:
        config: Any = HubConfig()
        self._name = name
        self._api: Any = HubApi(config)
        path = self._find_directory(config.cache_dir)
        listing = find_listing(name, path, self._query_listing)
        super().__init__(name, listing, config.cache_dir, path)

    def _find_directory(self, cache: Path) -> Path:
        """Return the directory of the revision in the client's cache, which may not exist yet."""
        repo, revision = self._name.repo, self._name.revision
        # Clients before 1.38 had one directory for all revisions, which later ones keep using.
        if self._name.is_default:
            with suppress(CacheNotFound):
                options = {"revision": revision, "local_files_only": True}
                return Path(self._api.download_file(repo, _MODEL, "config.json", **options)).parent
        return cache / f"{_MODEL}s" / repo.replace("/", "--") / "snapshots" / revision

    def _query_listing(self, name: HubName) -> Listing:
        """Query ModelScope for the repository's files, and store the listing in duoka's cache."""
        request = partial(self._api.list_repo_files, name.repo, _MODEL, revision=name.revision)
        files = [
            make_file(entry.path, entry.size, (entry.sha256 or "").lower())
            for entry in self._query(name, request)
            if not entry.is_dir
        ]
        by_name = {file.name: file for file in files if file is not None}
        return keep_listing(name, Listing(commit=name.revision, files=by_name))

    def _fetch_file(self, name: str, report: Callable[[int], object]) -> None:
        download = partial(
            self._api.downloader.download_file,
            self._name.repo,
            _MODEL,
            name,
            revision=self._name.revision,
            local_dir=self.path,
            expected_sha256=self._files[name].etag or None,
            file_size=self.size(name),
            progress_callbacks=[progress_class(report)],
        )
        self._query(self._hub_file(name), download)

    def _fetch_range(self, file: RemoteFile, start: int, stop: int) -> bytes:
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}

        def attempt() -> bytes:
            place = (self._name.repo, _MODEL, file.name, self._name.revision)
            with self._api.legacy.download_stream(*place, headers) as response:
                chunks = response.iter_content(FIRST_BYTES)
                return read_range(response.headers, chunks, start, stop)

        return self._query(self._hub_file(file.name), attempt, is_repeated=True)

    def _endpoint(self) -> str:
        return without_password(self._api.legacy.endpoint)

    def _query(self, name: HubName, request: Callable[[], T], *, is_repeated: bool = False) -> T:
        """Make a request; by default the client itself repeats it after a transient error."""
        is_transient = _is_transient if is_repeated else lambda error: False
        return query(name, request, is_transient=is_transient, translate=self._translate)

    def _translate(self, error: Exception, name: HubName) -> CheckpointError | None:
        """Translate an error; return None for errors unrelated to ModelScope: of the disk."""
        if isinstance(error, OSError) and error.errno is not None:
            return None
        status, token = getattr(error, "status_code", None), self._api.legacy.token
        values = {
            "hub": self._endpoint(),
            "wanted": name,
            "error": "the connection broke",
            "status": status,
            "token": "the token has no access" if token else "no token is set",
            "access": f"request access at {self._endpoint()}/models/{name.repo}, and log in "
            "(`modelscope login`) or set MODELSCOPE_API_TOKEN",
            "command": "modelscope login",
            "variable": "MODELSCOPE_ENDPOINT",
        }
        if isinstance(error, (FileIntegrityError, ValueError, AttributeError)):
            error = ValueError()
        elif status is None and isinstance(error, (HubError, OSError)):
            # Of the message only this: its URL may be signed.
            cause = re.search(r"\[Errno -?\d+\] [^'\")]+", str(error))
            error = http.ConnectError("") if cause else http.ReadError("")
            values["error"] = cause[0] if cause else values["error"]
        return choose_message((_MISSING, *MESSAGES), error, status, values)


def _is_transient(error: Exception) -> bool:
    # The errors of requests, the client's HTTP library, are OSErrors.
    return bool(getattr(error, "retryable", isinstance(error, (OSError, http.RemoteProtocolError))))


_MISSING = (
    {404},
    "{hub} has no such repository, revision or file: {wanted}",
    "check the spelling (ZhipuAI on ModelScope is zai-org on the Hub); for private repositories "
    "log in: modelscope login",
)

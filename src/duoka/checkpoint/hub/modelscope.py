"""Repositories on ModelScope, through its own client, modelscope_hub.

The client determines the address, the token and the cache (MODELSCOPE_ENDPOINT,
MODELSCOPE_API_TOKEN or a login, MODELSCOPE_CACHE). ModelScope doesn't report the commit of a
branch, and the client's cache has a directory for each revision. A file of a branch that has moved
is recognized by its hash, which the listing contains.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import is_offline_mode

from duoka.base.requirements import require_package
from duoka.base.web import http
from duoka.errors import CheckpointError

from .errors import Messages, choose_message, offline_error, query, without_password
from .listing import Listing, RemoteFile, keep_listing, kept_listing, make_file
from .repo_name import COMMIT, HubName
from .snapshot import HubSnapshot, read_range

_CHUNK_BYTES = 2**16
_MODEL = "model"  # ModelScope's other kinds of repositories are datasets and studios


def open_modelscope(name: HubName) -> ModelScopeSnapshot:
    """List the files of a revision; no file is fetched."""
    require_package("modelscope_hub", "modelscope", "models on ModelScope need")
    from modelscope_hub import HubApi
    from modelscope_hub.config import HubConfig

    config = HubConfig()
    api = HubApi(config)
    path = _find_directory(api, config.cache_dir, name)
    is_offline = is_offline_mode()
    listing = kept_listing(name) if is_offline or COMMIT.fullmatch(name.revision) else None
    if listing is None:
        listing = _list_directory(name, path) if is_offline else _query_listing(api, name)
    return ModelScopeSnapshot(name, listing, config.cache_dir, path, api)


def _find_directory(api: Any, cache: Path, name: HubName) -> Path:
    """Return the directory of a revision in the client's cache, which may not exist yet."""
    from modelscope_hub.errors import CacheNotFound

    directory = cache / f"{_MODEL}s" / name.repo.replace("/", "--") / "snapshots" / name.revision
    if not name.is_default:
        return directory
    # Clients before 1.38 had one directory for all revisions, which later ones keep using.
    with suppress(CacheNotFound):
        file = api.download_file(name.repo, _MODEL, "config.json", local_files_only=True)
        return Path(file).parent
    return directory


def _list_directory(name: HubName, path: Path) -> Listing:
    """List the files that other programs downloaded; their hashes are unknown."""
    if not (path / "config.json").is_file():
        raise offline_error(name)
    files = [
        RemoteFile(name=file.name, num_bytes=file.stat().st_size, etag="")
        for file in path.iterdir()
        if file.is_file()
    ]
    return Listing(commit=name.revision, files={file.name: file for file in files})


def _query_listing(api: Any, name: HubName) -> Listing:
    """Query ModelScope for a repository's files, and store the listing in duoka's cache."""
    entries = _query_once(
        api, name, lambda: api.list_repo_files(name.repo, _MODEL, revision=name.revision)
    )
    files = [make_file(entry.path, entry.size, (entry.sha256 or "").lower()) for entry in entries]
    by_name = {file.name: file for file in files if file is not None}
    return keep_listing(name, Listing(commit=name.revision, files=by_name))


class ModelScopeSnapshot(HubSnapshot):
    """A repository on ModelScope at one revision."""

    cache_variable = "MODELSCOPE_CACHE"

    def __init__(self, name: HubName, listing: Listing, cache: Path, path: Path, api: Any) -> None:
        super().__init__(name, listing, cache, path)
        self._api = api

    def _endpoint(self) -> str:
        return _endpoint(self._api)

    def _fetch_file(self, name: str, report: Callable[[int], object]) -> None:
        file = self._files[name]

        def download() -> None:
            self._api.downloader.download_file(
                self._name.repo,
                _MODEL,
                name,
                revision=self._name.revision,
                local_dir=self.path,
                expected_sha256=file.etag or None,
                file_size=file.num_bytes,
                progress_callbacks=[_progress_class(report)],
            )

        _query_once(self._api, self._hub_file(name), download)

    def _fetch_range(self, file: RemoteFile, start: int, stop: int) -> bytes:
        headers = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}

        def attempt() -> bytes:
            response = self._api.legacy.download_stream(
                self._name.repo, _MODEL, file.name, self._name.revision, headers
            )
            with response:
                return read_range(response.headers, response.iter_content(_CHUNK_BYTES), start, stop)

        return query(
            self._hub_file(file.name),
            attempt,
            is_transient=_is_transient,
            translate=lambda error, name: _translate(self._api, error, name),
        )


def _progress_class(report: Callable[[int], object]) -> type:
    """Make a callback class for the client that calls `report` with the bytes done."""

    class Counter:
        def __init__(self, filename: str, file_size: int) -> None:
            self.num_bytes = 0

        def update(self, size: int) -> None:
            self.num_bytes += size
            report(self.num_bytes)

        def end(self) -> None:
            """Do nothing: `report` has got all bytes."""

    return Counter


# ── errors ──


def _endpoint(api: Any) -> str:
    return without_password(api.legacy.endpoint)


def _query_once(api: Any, name: HubName, request: Callable[[], Any]) -> Any:
    """Make a request that the client itself repeats after a transient error."""
    return query(
        name,
        request,
        is_transient=lambda error: False,
        translate=lambda error, name: _translate(api, error, name),
    )


def _is_transient(error: Exception) -> bool:
    # The errors of requests, the client's HTTP library, are OSErrors without a number.
    is_broken = isinstance(error, OSError) and error.errno is None
    return getattr(error, "retryable", is_broken or isinstance(error, http.RemoteProtocolError))


_MESSAGES: Messages = (
    (
        {404},
        "{site} has no such repository, revision or file: {wanted}",
        "check the spelling (ZhipuAI on ModelScope is zai-org on the Hub); for private "
        "repositories log in: modelscope login",
    ),
    (
        {401, 403},
        "{site} denies access to {wanted}: {token}",
        "request access at {site}/models/{repo}, and log in (`modelscope login`) or set "
        "MODELSCOPE_API_TOKEN",
    ),
    (
        {*range(400, 600)},
        "{site} answers with status {status} to the request for {wanted}",
        "try again later",
    ),
    (
        (ValueError, TypeError, KeyError, AttributeError),
        "{site} sent other content than announced for {wanted}",
        "try again; check that MODELSCOPE_ENDPOINT is the URL of ModelScope and that no network "
        "log-in page intercepts requests",
    ),
    (
        (OSError, http.RemoteProtocolError),
        "{wanted} can't be fetched from {site}: {reason}",
        "check the network and MODELSCOPE_ENDPOINT, and run the command again: complete files are "
        "kept; HF_HUB_OFFLINE=1 uses the files in the cache",
    ),
)


def _translate(api: Any, error: BaseException, name: HubName) -> CheckpointError | None:
    """Translate an error; return None for errors unrelated to ModelScope, such as a full disk."""
    from modelscope_hub.errors import FileIntegrityError

    if isinstance(error, OSError) and error.errno is not None:
        return None
    if isinstance(error, FileIntegrityError):
        error = ValueError()
    status = getattr(error, "status_code", None)
    values = {
        "site": _endpoint(api),
        "wanted": name,
        "repo": name.repo,
        "status": status,
        "token": "the token lacks permission" if api.legacy.token else "there is no token",
        "reason": _reason(error),
    }
    return choose_message(_MESSAGES, error, status, values)


def _reason(error: BaseException) -> str:
    """Describe a failed transfer without its URL, which may be signed."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.strerror:
            return str(link)
        link = link.__cause__ or link.__context__
    return "no answer in time" if isinstance(error, TimeoutError) else "the connection broke"

"""Snapshot: a repository at one commit, as a directory whose files are fetched on demand."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import (
    constants,
    get_session,
    hf_hub_download,
    hf_hub_url,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    hf_raise_for_status,
    tqdm,
)

from duoka.base.files import cache_directory, keep, read_bytes
from duoka.base.requirements import require_package
from duoka.base.units import format_bytes
from duoka.base.web import http
from duoka.errors import CheckpointError, MachineError

from ..directory import Progress, is_inside
from ..headers import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_JSON_BYTES,
    TensorInfo,
    header_length,
    parse_header,
    read_header,
)
from .errors import endpoint, offline_error, query
from .listing import Listing, RemoteFile, has_known_hash, kept_listing, query_listing
from .repo_name import COMMIT, MODELSCOPE, HubName

# Most headers are shorter than this; a longer header takes a second request.
FIRST_BYTES = 2**16
_HEADERS_AT_ONCE = 8


def open_snapshot(name: HubName) -> HubSnapshot:
    """Resolve a revision to a commit and its list of files; no file is fetched."""
    if name.site == MODELSCOPE:
        require_package("modelscope_hub", "models on ModelScope need")
        from .modelscope import ModelScopeSnapshot

        return ModelScopeSnapshot(name)
    config = try_to_load_from_cache(name.repo, "config.json", revision=name.revision)
    known = Path(config).parent if isinstance(config, str) else None
    listing = find_listing(name, known, query_listing)
    folder = repo_folder_name(repo_id=name.repo, repo_type="model")
    cache = Path(constants.HF_HUB_CACHE).expanduser()
    path = cache / folder / "snapshots" / listing.commit
    return HubSnapshot(replace(name, revision=listing.commit), listing, cache, path)


def find_listing(
    name: HubName, directory: Path | None, query_files: Callable[[HubName], Listing]
) -> Listing:
    """Query the files of a revision; offline, or of a commit, return the stored list if possible.

    Offline without a stored list, list the files that other programs downloaded into `directory`.
    """
    is_offline = is_offline_mode()
    listing = kept_listing(name) if is_offline or COMMIT.fullmatch(name.revision) else None
    if listing is not None:
        return listing
    if not is_offline:
        return query_files(name)
    if directory is None or not (directory / "config.json").is_file():
        raise offline_error(name)
    # In huggingface_hub's cache a file is a link to a blob named after its hash. Only this link is
    # followed: the blob may be a link itself, to a blob with another name that models share.
    files = [
        RemoteFile(
            name=path.name,
            num_bytes=path.stat().st_size,
            etag=path.readlink().name if path.is_symlink() else "",
        )
        for path in directory.iterdir()
        if path.is_file()
    ]
    return Listing(commit=directory.name, files={file.name: file for file in files})


# huggingface_hub's cache of a repository:
#
#   models--org--name/refs/main                        the commit of a branch
#   models--org--name/snapshots/COMMIT/config.json  →  ../../blobs/HASH
#   models--org--name/blobs/HASH                       the content, named after its hash
#   models--org--name/blobs/HASH.incomplete            the part of an interrupted download
#
# duoka adds no files of its own to this cache. Its own cache has the listing of a commit, headers
# of files that aren't downloaded, and markers of files whose hash was verified.
class HubSnapshot:
    """A repository of the Hub at one commit, with the interface of `LocalFolder`."""

    cache_variable = "HF_HOME"

    def __init__(self, name: HubName, listing: Listing, cache: Path, path: Path) -> None:
        self._name = name
        self.source = str(name)
        self._files = listing.files
        self._cache = cache
        self.path = path

    def names(self) -> frozenset[str]:
        """Return the names of the checkpoint's files in the repository."""
        return frozenset(self._files)

    def size(self, name: str) -> int:
        """Return a file's size in bytes, as listed."""
        return self._files[name].num_bytes

    def fetch(self, name: str) -> Path:
        """Fetch and verify a small file, and return its path."""
        if self.size(name) > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{self._hub_file(name)} has {self.size(name)} bytes; at most {MAX_JSON_BYTES} "
                "are read",
                hint="check the name of the repository",
            )
        self.download([name])
        return self.path / name

    def headers(self, names: Sequence[str]) -> dict[str, dict[str, TensorInfo]]:
        """Read the headers of safetensors files; of a missing file fetch the header alone."""
        with ThreadPoolExecutor(_HEADERS_AT_ONCE) as pool:
            return dict(zip(names, pool.map(self._read_header, names), strict=True))

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names of files not yet on this machine."""
        return tuple(name for name in names if not self._is_here(name))

    def download(self, names: Sequence[str], progress: Progress | None = None) -> None:
        """Download the missing files, and verify the hash of each file that changed.

        `progress` is called with the bytes done so far and the total bytes.
        """
        absent = self.missing(names)
        if absent and is_offline_mode():
            raise CheckpointError(
                f"{len(absent)} files of {self.source} are not in the cache, and HF_HUB_OFFLINE "
                f"forbids requests to the Hub: {', '.join(absent)}",
                hint="unset HF_HUB_OFFLINE to download them",
            )
        self._refuse_full_disk(absent)
        total = sum(self.size(name) for name in names)
        done = 0

        def report(file_bytes: int) -> None:
            if progress is not None:
                progress(min(done + file_bytes, total), total)  # a retry counts bytes twice

        for name in names:
            if name in absent:
                self._download_file(name, report)
            self._verify(name)
            done += self.size(name)
            report(0)

    def _endpoint(self) -> str:
        return endpoint()

    def _hub_file(self, name: str) -> HubName:
        return replace(self._name, file=name)

    def _is_here(self, name: str) -> bool:
        """Return True if a file in the cache has the listed size."""
        path = self.path / name
        with suppress(OSError):
            return path.stat().st_size == self.size(name) and is_inside(path, self.path)
        return False

    def _download_file(self, name: str, report: Callable[[int], object]) -> None:
        """Download one file into the cache; `report` gets the bytes done."""
        try:
            self._fetch_file(name, report)
        except OSError as error:
            raise MachineError(
                f"{self._hub_file(name)} can't be kept in {self._cache}: {error.strerror}",
                hint=f"set {self.cache_variable} to another directory",
            ) from error

    def _fetch_file(self, name: str, report: Callable[[int], object]) -> None:
        """Download one file; an OSError is of the disk."""
        download = partial(
            hf_hub_download,
            self._name.repo,
            name,
            revision=self._name.revision,
            library_name="duoka",
            etag_timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            # An existing file has a wrong size, or it would not be missing.
            force_download=(self.path / name).exists(),
            tqdm_class=progress_class(report),
        )
        query(self._hub_file(name), download)

    def _verify(self, name: str) -> None:
        """Remove a file whose content is wrong, with its blob, and raise CheckpointError."""
        path, file = self.path / name, self._files[name]
        if self._is_here(name) and has_known_hash(path, file):
            return
        shared_blob = path.resolve() if is_inside(path, self.path) else path
        for place in (path, self.path.parents[1] / "blobs" / file.etag, shared_blob):
            with suppress(OSError):
                place.unlink()
        raise CheckpointError(
            f"{self._hub_file(name)} in {self._cache} differs from the content that "
            f"{self._endpoint()} announces; it was removed",
            hint="run the command again; if it happens again, the file on the Hub is damaged",
        )

    def _refuse_full_disk(self, names: Iterable[str]) -> None:
        """Raise MachineError if the disk of the cache has too little free space for files."""
        needed = sum(self.size(name) for name in names)
        place = next(folder for folder in (self._cache, *self._cache.parents) if folder.exists())
        free = shutil.disk_usage(place).free
        if needed > free:
            raise MachineError(
                f"{self.source} needs {format_bytes(needed)} more disk space, and {self._cache} "
                f"has {format_bytes(free)} free",
                hint=f"free some space, or set {self.cache_variable} to a directory on another "
                "disk",
            )

    # ── headers ──

    def _read_header(self, name: str) -> dict[str, TensorInfo]:
        """Read a header from the file, else from duoka's cache, else from the Hub."""
        file, path = self._files[name], self.path / name
        if self._is_here(name):
            return read_header(path)
        cached = cache_directory() / "headers" / f"{file.etag}-{file.num_bytes}"
        with suppress(OSError, ValueError, CheckpointError):
            return self._parse_header(file, read_bytes(cached, most_bytes=MAX_HEADER_BYTES))
        text = self._fetch_header(file)
        tensors = self._parse_header(file, text)
        if file.etag:
            keep(cached, text.decode("utf-8"))
        return tensors

    def _parse_header(self, file: RemoteFile, text: bytes) -> dict[str, TensorInfo]:
        data_bytes = file.num_bytes - LENGTH_BYTES - len(text)
        return parse_header(text, data_bytes, self.path / file.name)

    def _fetch_header(self, file: RemoteFile) -> bytes:
        """Fetch the bytes of a safetensors header, in one request or two."""
        hub_file, size = self._hub_file(file.name), file.num_bytes
        if is_offline_mode():
            raise offline_error(hub_file)
        start = self._fetch_range(file, 0, min(FIRST_BYTES, size)) if size else b""
        stop = LENGTH_BYTES + header_length(start[:LENGTH_BYTES], size, str(hub_file))
        if stop > len(start):
            start += self._fetch_range(file, len(start), stop)
        return start[LENGTH_BYTES:stop]

    def _fetch_range(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """Fetch a range of a file's bytes.

        huggingface_hub's `parse_safetensors_file_metadata` would read a whole shard of gigabytes
        from a server that ignores ranges, and doesn't check the header.
        """
        headers = {
            **build_hf_headers(library_name="duoka"),
            "Range": f"bytes={start}-{stop - 1}",
            "Accept-Encoding": "identity",
        }
        url = hf_hub_url(self._name.repo, file.name, revision=self._name.revision)
        timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT

        def attempt() -> bytes:
            with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
                hf_raise_for_status(response)
                return read_range(response.headers, response.iter_bytes(FIRST_BYTES), start, stop)

        return query(self._hub_file(file.name), attempt)


def read_range(headers: Mapping[str, str], chunks: Iterable[bytes], start: int, stop: int) -> bytes:
    """Read a range of bytes from a response; never read more, even if the server sends more."""
    if not headers.get("content-range", "").startswith(f"bytes {start}-"):
        raise ValueError("another byte range than requested")
    content = bytearray()
    for chunk in chunks:
        content.extend(chunk)
        if len(content) >= stop - start:
            return bytes(content[: stop - start])
    raise http.RemoteProtocolError("the transfer ended early")


def progress_class(report: Callable[[int], object]) -> type:
    """Make a silent progress bar class for both clients that calls `report` with the bytes done."""

    class Counter(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.num_bytes = int(options.get("initial") or 0)
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, num_bytes: float | None = 1) -> None:
            self.num_bytes += int(num_bytes or 0)
            report(self.num_bytes)

        def end(self) -> None:
            """Do nothing: ModelScope's client calls this at the end."""

    return Counter

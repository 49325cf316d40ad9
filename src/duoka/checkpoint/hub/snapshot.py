"""Snapshots: a repository at one commit, as a directory whose files are fetched when needed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    build_hf_headers,
    hf_raise_for_status,
    tqdm,
)

from duoka.base.files import cache_directory, read_bytes, write_whole
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
from .errors import ask, endpoint, offline
from .listing import Listing, RemoteFile, ask_listing, is_right, kept_listing
from .repo_name import COMMIT, HubName, Wanted

# Most headers are shorter than this; the rest costs one request more.
_FIRST_BYTES = 2**16
_HEADERS_AT_ONCE = 8


def open_snapshot(name: HubName) -> HubSnapshot:
    """Find out which commit a revision is, and what it holds; no file is fetched."""
    if is_offline_mode():
        return HubSnapshot(name.repo, kept_listing(name) or _cached_listing(name))
    known = kept_listing(name) if COMMIT.fullmatch(name.revision) else None
    return HubSnapshot(name.repo, known or ask_listing(name))


def _cached_listing(name: HubName) -> Listing:
    """What is in huggingface_hub's cache of a revision, whoever put it there."""
    config = try_to_load_from_cache(name.repo, "config.json", revision=name.revision)
    if not isinstance(config, str):
        raise offline(Wanted(name=name))
    snapshot = Path(config).parent
    files = [
        RemoteFile(name=path.name, num_bytes=path.stat().st_size, etag=_etag(path))
        for path in snapshot.iterdir()
        if path.is_file()
    ]
    return Listing(commit=snapshot.name, files={file.name: file for file in files})


def _etag(path: Path) -> str:
    """The name of the blob that a file of the cache is a link to; empty if it is no link.

    One step alone: the blob may be a link itself, to one that models share, under another name.
    """
    return path.readlink().name if path.is_symlink() else ""


class HubSnapshot:
    """A repository of the Hub at one commit."""

    def __init__(self, repo: str, listing: Listing) -> None:
        self._name = HubName(repo=repo, revision=listing.commit)
        self._files = listing.files
        self._cache = Path(constants.HF_HUB_CACHE).expanduser()

    @property
    def path(self) -> Path:
        """The directory in huggingface_hub's cache where fetched files can be seen."""
        repo = "--".join(["models", *self._name.repo.split("/")])
        return self._cache / repo / "snapshots" / self._name.revision

    @property
    def source(self) -> str:
        """Repository and commit, as "org/name@commit"."""
        return str(self._name)

    def names(self) -> frozenset[str]:
        """The files of the repository that can belong to a checkpoint."""
        return frozenset(self._files)

    def size(self, name: str) -> int:
        """Bytes of a file, as the Hub tells."""
        return self._files[name].num_bytes

    def fetch(self, name: str) -> Path:
        """Make sure that a small file is here, and right."""
        if self.size(name) > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{self._wanted(name)} has {self.size(name)} bytes; at most {MAX_JSON_BYTES} "
                "are read",
                hint="is this the right repository?",
            )
        self.download([name])
        return self.path / name

    def headers(self, names: Sequence[str]) -> dict[str, dict[str, TensorInfo]]:
        """What safetensors files hold; of those that aren't here, the headers alone are fetched."""
        pool = ThreadPoolExecutor(_HEADERS_AT_ONCE)
        try:
            return dict(zip(names, pool.map(self._header, names), strict=True))
        finally:  # after an error, or Ctrl-C, nobody waits for the others
            pool.shutdown(wait=False, cancel_futures=True)

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Which of these files are not on this machine."""
        return tuple(name for name in names if not self._is_here(name))

    def download(self, names: Sequence[str], progress: Progress | None = None) -> None:
        """Make sure that files are here, whole and right.

        Each is held against the hash that the Hub tells, once: that it was right is remembered
        until the file is touched.
        """
        absent = self.missing(names)
        if absent and is_offline_mode():
            raise CheckpointError(
                f"{len(absent)} files of {self.source} are not in the cache, and the Hub may not "
                f"be asked, because HF_HUB_OFFLINE is set: {', '.join(absent)}",
                hint="unset HF_HUB_OFFLINE to download them",
            )
        self._refuse_full_disk(absent)
        total = sum(self.size(name) for name in names)
        done = 0
        for name in names:
            if name in absent:
                self._get(name, partial(_report, progress, done, total))
            self._verify(name)
            done += self.size(name)
            if progress is not None:
                progress(done, total)

    def _wanted(self, name: str) -> Wanted:
        return Wanted(name=self._name, file=name)

    def _is_here(self, name: str) -> bool:
        """Whether a file is in the cache, has the right length and doesn't lie elsewhere."""
        path = self.path / name
        with suppress(OSError):
            return path.stat().st_size == self.size(name) and is_inside(path, self.path)
        return False

    def _get(self, name: str, moved: Callable[[int], object]) -> None:
        try:
            ask(
                self._wanted(name),
                lambda: hf_hub_download(
                    self._name.repo,
                    name,
                    revision=self._name.revision,
                    library_name="duoka",
                    etag_timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
                    # What is there has another length.
                    force_download=(self.path / name).exists(),
                    tqdm_class=_counter(moved),
                ),
            )
        except OSError as error:
            raise MachineError(
                f"{self._wanted(name)} can't be kept in {self._cache}: {error.strerror}",
                hint="HF_HOME names another place for what is downloaded",
            ) from error

    def _verify(self, name: str) -> None:
        if not self._is_here(name) or not is_right(self.path / name, self._files[name]):
            self._remove(name)
            raise CheckpointError(
                f"{self._wanted(name)} has another content in {self._cache} than {endpoint()} "
                "tells of; it was removed",
                hint="run the command again; if it happens again, the file on the Hub is damaged",
            )

    def _blob(self, name: str) -> Path:
        return self.path.parents[1] / "blobs" / self._files[name].etag

    def _remove(self, name: str) -> None:
        path = self.path / name
        shared = path.resolve() if is_inside(path, self.path) else path
        for place in (path, self._blob(name), shared):
            with suppress(OSError):
                place.unlink()

    def _refuse_full_disk(self, names: Iterable[str]) -> None:
        needed = sum(self.size(name) for name in names)
        place = next(folder for folder in (self._cache, *self._cache.parents) if folder.exists())
        free = shutil.disk_usage(place).free
        if needed > free:
            raise MachineError(
                f"{self.source} needs {format_bytes(needed)} more on the disk, and "
                f"{self._cache} has {format_bytes(free)} free",
                hint="free some, or let HF_HOME name a place on another disk",
            )

    # ── headers ──

    def _header(self, name: str) -> dict[str, TensorInfo]:
        file, path = self._files[name], self.path / name
        if self._is_here(name):
            return read_header(path)
        cached = cache_directory() / "headers" / f"{file.etag}-{file.num_bytes}"
        with suppress(OSError, ValueError, CheckpointError):
            return self._parse(file, read_bytes(cached, most_bytes=MAX_HEADER_BYTES))
        text = self._ask_header(file)
        tensors = self._parse(file, text)
        with suppress(OSError):
            cached.parent.mkdir(parents=True, exist_ok=True)
            write_whole(cached, text.decode("utf-8"))
        return tensors

    def _parse(self, file: RemoteFile, text: bytes) -> dict[str, TensorInfo]:
        data_bytes = file.num_bytes - LENGTH_BYTES - len(text)
        return parse_header(text, data_bytes, self.path / file.name)

    def _ask_header(self, file: RemoteFile) -> bytes:
        wanted, size = self._wanted(file.name), file.num_bytes
        if is_offline_mode():
            raise offline(wanted)
        start = self._ask_range(file, 0, min(_FIRST_BYTES, size)) if size else b""
        stop = LENGTH_BYTES + header_length(start[:LENGTH_BYTES], size, str(wanted))
        if stop > len(start):
            start += self._ask_range(file, len(start), stop)
        return start[LENGTH_BYTES:stop]

    def _ask_range(self, file: RemoteFile, start: int, stop: int) -> bytes:
        """Some bytes of a file, and no more, whatever the server sends."""
        repo, commit = self._name.repo, self._name.revision
        headers = {
            **build_hf_headers(library_name="duoka"),
            "Range": f"bytes={start}-{stop - 1}",
            "Accept-Encoding": "identity",
        }

        def attempt() -> bytes:
            content = bytearray()
            with get_session().stream(
                "GET",
                hf_hub_url(repo, file.name, revision=commit),
                headers=headers,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            ) as response:
                hf_raise_for_status(response)
                first = _first_byte(response)
                if first not in (0, start):
                    raise ValueError("another part than was asked for")
                for chunk in response.iter_bytes(_FIRST_BYTES):
                    content.extend(chunk)
                    if first + len(content) >= stop:
                        return bytes(content[start - first : stop - first])
            raise http.RemoteProtocolError("it ended before all had arrived")

        return ask(self._wanted(file.name), attempt)


def _first_byte(response: Any) -> int:
    """Where in a file an answer begins: 0 where a server doesn't send parts."""
    if response.status_code != 206:
        return 0
    return int(response.headers["content-range"].removeprefix("bytes ").partition("-")[0])


def _report(progress: Progress | None, before: int, total: int, now: int) -> None:
    if progress is not None:
        progress(min(before + now, total), total)  # what is repaired is counted twice


def _counter(moved: Callable[[int], object]) -> type:
    """What huggingface_hub takes for a progress bar; it draws nothing."""

    class Counter(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            self.num_bytes = int(options.get("initial") or 0)
            super().__init__(*args, **{**options, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, num_bytes: float | None = 1) -> None:
            self.num_bytes += int(num_bytes or 0)
            moved(self.num_bytes)

    return Counter

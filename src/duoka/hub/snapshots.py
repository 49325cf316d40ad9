"""Snapshots: a repository at one commit, as a folder whose files are fetched when needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from huggingface_hub import hf_hub_url, is_offline_mode

from duoka.errors import CheckpointError, MachineError
from duoka.files import cache_directory, read_bytes, write_whole
from duoka.folders import Progress
from duoka.headers import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    MAX_JSON_BYTES,
    TensorInfo,
    header_length,
    parse_header,
    read_header,
)
from duoka.units import format_bytes

from .answers import offline
from .listings import Listing, RemoteFile, ask_listing, kept_listing
from .names import COMMIT, HubName, Wanted
from .obtaining import obtain
from .places import raw_endpoint
from .store import Store
from .transfers import Moved
from .web import read_range

# Most headers are shorter than this; the rest costs one request more.
_FIRST_BYTES = 2**16
_HEADERS_AT_ONCE = 8


def open_snapshot(name: HubName) -> Snapshot:
    """Find out which commit a revision is, and what it holds; no file is fetched.

    Raises
    ------
    CheckpointError
        If there is no such repository or revision, or it can't be asked for.
    """
    store = Store(name.repo)
    if is_offline_mode():
        commit = store.commit_of(name.revision)
        listing = commit and (kept_listing(name.repo, commit) or store.local_listing(commit))
        if not listing:
            raise offline(Wanted(name=name))
        return Snapshot(name.repo, listing)
    known = COMMIT.fullmatch(name.revision) and kept_listing(name.repo, name.revision)
    listing = known or ask_listing(name)
    store.keep_commit(name.revision, listing.commit)
    return Snapshot(name.repo, listing)


class Snapshot:
    """A repository of the Hub at one commit.

    Parameters
    ----------
    repo : str
    listing : Listing
    """

    def __init__(self, repo: str, listing: Listing) -> None:
        self._name = HubName(repo=repo, revision=listing.commit)
        self._files = listing.files
        self._store = Store(repo)

    @property
    def path(self) -> Path:
        """The directory in huggingface_hub's cache where fetched files can be seen."""
        return self._store.snapshot(self._name.revision)

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
        """Make sure that a small file is here, and right.

        Raises
        ------
        CheckpointError
            If it can't be had, or is no small file.
        """
        if self.size(name) > MAX_JSON_BYTES:
            raise CheckpointError(
                f"{self._wanted(name)} has {self.size(name)} bytes; at most {MAX_JSON_BYTES} "
                "are read"
            )
        self.download([name])
        return self.path / name

    def headers(self, names: Sequence[str]) -> dict[str, dict[str, TensorInfo]]:
        """What safetensors files hold; of those that aren't here, the headers alone are fetched.

        Raises
        ------
        CheckpointError
            If one can't be had, or is damaged.
        """
        with ThreadPoolExecutor(_HEADERS_AT_ONCE) as pool:
            return dict(zip(names, pool.map(self._header, names), strict=True))

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Which of these files are not on this machine."""
        commit = self._name.revision
        return tuple(n for n in names if self._store.find(commit, self._files[n]) is None)

    def download(self, names: Sequence[str], progress: Progress | None = None) -> None:
        """Make sure that files are here, whole and right.

        Each is held against the hash that the Hub tells, once: that it was right is remembered
        until the file is touched.

        Raises
        ------
        CheckpointError
            If one can't be had, or isn't what it should be; such a file is removed.
        MachineError
            If there is no room for them.
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

            def moved(now: int, before: int = done) -> None:
                if progress is not None:
                    progress(before + now, total)

            moved(0)
            self._obtain(name, moved)
            done += self.size(name)
        if progress is not None:
            progress(done, total)

    def _obtain(self, name: str, moved: Moved) -> None:
        try:
            obtain(self._store, self._wanted(name), self._files[name], moved)
        except OSError as error:
            raise MachineError(
                f"{self._wanted(name)} can't be kept in {self._store.root}: {error.strerror}",
                hint="HF_HOME names another place for what is downloaded",
            ) from error

    def explain(self) -> str:
        """Nothing: what a commit holds never changes."""
        return ""

    def _wanted(self, name: str) -> Wanted:
        return Wanted(name=self._name, file=name)

    def _refuse_full_disk(self, names: Iterable[str]) -> None:
        needed = sum(self._store.remaining_bytes(self._files[name]) for name in names)
        free = self._store.free_bytes()
        if needed > free:
            raise MachineError(
                f"{self.source} needs {format_bytes(needed)} more on the disk, and "
                f"{self._store.root.parent} has {format_bytes(free)} free",
                hint="free some, or let HF_HOME name a place on another disk",
            )

    # ── headers ──

    def _header(self, name: str) -> dict[str, TensorInfo]:
        file, path = self._files[name], self.path / name
        here = self._store.find(self._name.revision, file)
        if here is not None:
            return _at(path, read_header(here))
        kept = cache_directory() / "headers" / f"{file.etag}-{file.num_bytes}"
        with suppress(OSError, ValueError, CheckpointError):
            return self._parse(file, read_bytes(kept, most_bytes=MAX_HEADER_BYTES))
        text = self._ask_header(file)
        tensors = self._parse(file, text)
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            write_whole(kept, text.decode("utf-8"))
        return tensors

    def _parse(self, file: RemoteFile, text: bytes) -> dict[str, TensorInfo]:
        data_bytes = file.num_bytes - LENGTH_BYTES - len(text)
        return parse_header(text, data_bytes, self.path / file.name)

    def _ask_header(self, file: RemoteFile) -> bytes:
        wanted, size = self._wanted(file.name), file.num_bytes
        if is_offline_mode():
            raise offline(wanted)
        url = hf_hub_url(
            self._name.repo, file.name, revision=self._name.revision, endpoint=raw_endpoint()
        )
        start = read_range(url, wanted, 0, min(_FIRST_BYTES, size), size) if size else b""
        stop = LENGTH_BYTES + header_length(start[:LENGTH_BYTES], size, str(wanted))
        if stop > len(start):
            start += read_range(url, wanted, len(start), stop, size)
        return start[LENGTH_BYTES:stop]


def _at(path: Path, tensors: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The same tensors in a file that shows the same content under another name."""
    return {name: replace(tensor, file=path) for name, tensor in tensors.items()}

"""Obtaining: one file of the Hub, found in the cache or fetched, and right in any case."""

from __future__ import annotations

from duoka.errors import CheckpointError

from .listings import RemoteFile
from .names import Wanted
from .places import endpoint
from .store import Store, has_right_hash, is_verified, remember
from .transfers import Moved, transfer
from .xet import transfer_by_xet


def obtain(store: Store, wanted: Wanted, file: RemoteFile, moved: Moved) -> None:
    """See to it that a file is in the cache, whole and right.

    Parameters
    ----------
    store : Store
    wanted : Wanted
        With the commit as revision.
    file : RemoteFile
    moved : callable
        Called with the bytes that are there so far.

    Raises
    ------
    CheckpointError
        If it can't be had, or its content isn't what the Hub tells; then it is removed.
    OSError
        If it can't be kept.
    """
    commit = wanted.name.revision
    if store.find(commit, file) is None:
        blob = store.blob(file)
        blob.parent.mkdir(parents=True, exist_ok=True)
        store.drop_other_length(file)
        if not transfer_by_xet(wanted, file, blob, moved):
            transfer(wanted, file, blob, moved)
            remember(blob, file)
    store.link(commit, file)
    path = store.snapshot(commit) / file.name
    if is_verified(path, file):
        return
    if not has_right_hash(path, file):
        store.drop(commit, file)
        raise CheckpointError(
            f"{path} had another content than {endpoint()} tells of {wanted}; it was removed",
            hint="run the command again to download it again",
        )
    remember(path, file)

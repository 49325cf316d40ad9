"""Xet: the Hub's own storage of large files, which huggingface_hub fetches in pieces.

It is quicker than plain HTTP. Where it fails, plain HTTP is left, which the Hub offers for the
same files. HF_HUB_DISABLE_XET turns it off.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

from .listings import RemoteFile
from .names import Wanted
from .places import raw_endpoint
from .transfers import Moved

_LOOK_SECONDS = 0.5


def transfer_by_xet(wanted: Wanted, file: RemoteFile, blob: Path, moved: Moved) -> bool:
    """Download a file if it can be had this way; whether its content is right remains to be seen.

    Returns
    -------
    bool
        Whether it is there now.
    """
    if constants.HF_HUB_DISABLE_XET or importlib.util.find_spec("hf_xet") is None:
        return False
    if file.sha256 is None:
        return False
    repo, commit = wanted.name.repo, wanted.name.revision
    # Whatever goes wrong here, the plain way is taken next, and its error is the one to tell.
    with suppress(Exception):
        url = hf_hub_url(repo, file.name, revision=commit, endpoint=raw_endpoint())
        if get_hf_file_metadata(url).xet_file_data is None:
            return False
        with _watching(blob, moved):
            hf_hub_download(repo, file.name, revision=commit)
    return blob.exists()


@contextmanager
def _watching(blob: Path, moved: Moved) -> Iterator[None]:
    """Tell how long the unfinished file has become, twice a second."""
    done = Event()

    def watch() -> None:
        while not done.wait(_LOOK_SECONDS):
            with suppress(OSError):
                moved(max(p.stat().st_size for p in blob.parent.glob(f"{blob.name}*.incomplete")))

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()

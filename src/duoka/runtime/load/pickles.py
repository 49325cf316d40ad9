"""Reads pickled weights (``pytorch_model*.bin``), the file format before safetensors.

A pickle is a program. torch loads it with ``weights_only``, which runs only code that builds
tensors; this module reports the names that torch refuses. Zip archives, as `torch.save` writes
them, are checked before: torch maps their entries as they are in the file, and would read
compressed bytes as weights.
"""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from duoka.base.files import open_regular
from duoka.errors import LoadError

_ZIP_START = b"PK\x03\x04"
_ORDER = "don't load it in another way, unless you trust its author"
_OTHER = "use the weight file that was published with the model"
DAMAGED = "the download may be incomplete: download the file again"
# The errors that the libraries raise for a damaged file.
_DAMAGE = (
    *(SafetensorError, pickle.UnpicklingError, OSError),
    *(RuntimeError, EOFError, KeyError, ValueError),
)
# The name of a refused function or class in torch's error.
_NAMED = re.compile(r"GLOBAL ([\w.]+)")


@contextmanager
def damage_told(file: Path) -> Iterator[None]:
    """Turn the libraries' errors for a damaged file into LoadError with the file's name."""
    try:
        yield
    except _DAMAGE as error:
        raise LoadError(f"{file} can't be read: {error}", hint=DAMAGED) from error


def load_pickle(file: Path, *, map_location: str) -> dict[str, Tensor]:
    """Load a dict of tensors, mapped from the file if its format allows; refuse other objects."""
    with damage_told(file):
        loaded = _load(file, map_location, is_archive=_is_archive(file))
    if not isinstance(loaded, dict):
        raise LoadError(
            f"{file} contains {type(loaded).__name__}, not a dict of tensors", hint=_OTHER
        )
    strange = [_printable(name) for name, value in loaded.items() if not _is_entry(name, value)]
    if strange:
        raise LoadError(
            f"{file} holds {len(strange)} entries that are not tensors: {', '.join(strange[:20])}",
            hint=_OTHER,
        )
    return loaded


def _load(file: Path, map_location: str, *, is_archive: bool) -> Any:
    """Load a pickle with ``weights_only``; raise LoadError if torch refuses."""
    try:
        with warnings.catch_warnings(action="ignore"):  # about newer pickle protocols
            return torch.load(file, map_location=map_location, weights_only=True, mmap=is_archive)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle may raise anything
        # torch's own text, which advises to load the file with code allowed, isn't passed on.
        named = _NAMED.search(str(error))
        if named is None:
            raise LoadError(
                f"{file} can't be read: it is damaged, or contains more than tensors",
                hint=f"{DAMAGED}; {_ORDER}",
            ) from error
        raise LoadError(
            f"{file} is refused: it refers to {_printable(named[1])}, and weights need no code",
            hint=_ORDER,
        ) from error


def _is_archive(file: Path) -> bool:
    """Return True for a zip archive, as since PyTorch 1.6; raise LoadError for a suspect one."""
    with open_regular(file) as opened:
        if opened.read(len(_ZIP_START)) != _ZIP_START:
            return False
        if not zipfile.is_zipfile(opened):
            raise LoadError(f"{file} is truncated", hint=DAMAGED)
        with zipfile.ZipFile(opened) as archive:
            _check_archive(file, archive)
    return True


def _is_entry(name: object, value: object) -> bool:
    """Return True for a tensor under a printable name."""
    return isinstance(name, str) and name.isprintable() and isinstance(value, Tensor)


def _check_archive(file: Path, archive: zipfile.ZipFile) -> None:
    """Raise LoadError for entries that are compressed, or together larger than the file."""
    size = file.stat().st_size
    entries = archive.infolist()
    squeezed = [e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED]
    declared = sum(entry.file_size for entry in entries)
    if squeezed or declared > size:
        what = f"{squeezed[0]!r} in it is compressed" if squeezed else f"it declares {declared}"
        raise LoadError(
            f"{file} has {size} bytes, and {what}: PyTorch doesn't write such files", hint=_ORDER
        )


def _printable(argument: object) -> str:
    """Return text from a file in quotes, in ASCII and shortened."""
    return ascii(str(argument).replace(" ", ".")[:80])

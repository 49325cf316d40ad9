"""Pickles: the files of 2023 (``pytorch_model*.bin``).

A pickle is a program. torch loads it with ``weights_only``, which runs only code that builds
tensors; refused names are reported here. The zip archives that `torch.save` writes are checked
before: torch maps their entries as they lie in the file, and would take compressed bytes for
weights.
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
# All that the libraries raise on a damaged file.
_DAMAGE = (
    *(SafetensorError, pickle.UnpicklingError, OSError),
    *(RuntimeError, EOFError, KeyError, ValueError),
)
# How torch's refusals name what a pickle asks for.
_NAMED = re.compile(r"GLOBAL ([\w.]+)")


@contextmanager
def damage_told(file: Path) -> Iterator[None]:
    """Turn the libraries' errors on a damaged file into an error with its name."""
    try:
        yield
    except _DAMAGE as error:
        raise LoadError(f"{file} can't be read: {error}", hint=DAMAGED) from error


def load_pickle(file: Path, *, map_location: str) -> dict[str, Tensor]:
    """Load a dict of tensors, mapped from the file where its format allows it."""
    with damage_told(file):
        loaded = _load(file, map_location, is_archive=_is_archive(file))
    if not isinstance(loaded, dict):
        raise LoadError(
            f"{file} contains {type(loaded).__name__}, not a dict of tensors", hint=_OTHER
        )
    strange = [_shown(name) for name, value in loaded.items() if not _is_entry(name, value)]
    if strange:
        raise LoadError(
            f"{file} holds {len(strange)} entries that are not tensors: {', '.join(strange[:20])}",
            hint=_OTHER,
        )
    return loaded


def _load(file: Path, map_location: str, *, is_archive: bool) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # of pickle protocols that it may not know
            return torch.load(file, map_location=map_location, weights_only=True, mmap=is_archive)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle makes its reader raise anything
        # torch's own text advises to load it with code allowed.
        named = _NAMED.search(str(error))
        if named is None:
            raise LoadError(
                f"{file} can't be read: it is damaged, or contains more than tensors",
                hint=f"{DAMAGED}; {_ORDER}",
            ) from error
        raise LoadError(
            f"{file} is refused: it refers to {_shown(named[1])}, and weights need no code",
            hint=_ORDER,
        ) from error


def _is_archive(file: Path) -> bool:
    """Return True for a zip archive, as since PyTorch 1.6; refuse archives of other origin."""
    with open_regular(file) as opened:
        if opened.read(len(_ZIP_START)) != _ZIP_START:
            return False
        if not zipfile.is_zipfile(opened):
            raise LoadError(f"{file} is truncated", hint=DAMAGED)
        with zipfile.ZipFile(opened) as archive:
            _look_through_archive(file, archive)
    return True


def _is_entry(name: object, value: object) -> bool:
    return isinstance(name, str) and name.isprintable() and isinstance(value, Tensor)


def _look_through_archive(file: Path, archive: zipfile.ZipFile) -> None:
    size = file.stat().st_size
    entries = archive.infolist()
    squeezed = [e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED]
    declared = sum(entry.file_size for entry in entries)
    if squeezed or declared > size:
        what = f"{squeezed[0]!r} in it is compressed" if squeezed else f"it declares {declared}"
        raise LoadError(
            f"{file} has {size} bytes, and {what}: PyTorch doesn't write such files", hint=_ORDER
        )


def _shown(argument: object) -> str:
    return ascii(str(argument).replace(" ", ".")[:80])

"""Pickles: the files of 2023 (``pytorch_model*.bin``), looked through before they are loaded.

A pickle is a program. torch loads it with ``weights_only``, which runs nothing but what builds
tensors; here it is looked through beforehand, without running anything, so that what is refused is
named, and so that no declared size is believed that the file can't hold.

The containers are those that `torch.save` writes: a zip archive since PyTorch 1.6, before that
five pickles in a row, then the data.
"""

from __future__ import annotations

import io
import mmap
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from duoka.base.files import open_regular
from duoka.errors import LoadError

_ZIP_START = b"PK\x03\x04"
_MAX_PICKLE_BYTES = 100_000_000
_OLD_PICKLES = 5
_ORDER = "don't load it another way either, unless you know who made it"
_OTHER = "is this the file of weights that was published with the model?"
_CUT_OFF = "the download may be incomplete: fetch it again"
# What `torch.save` writes of a dict of tensors, besides the types of torch's storages.
_ALLOWED = frozenset(
    {
        "collections OrderedDict",
        "torch Size",
        "torch.nn.parameter Parameter",
        "torch._utils _rebuild_parameter",
        "torch._utils _rebuild_tensor",
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_tensor_v3",
        "torch.storage TypedStorage",
        "torch.storage UntypedStorage",
    }
)
# Ways to name code that `torch.save` doesn't use.
_STRANGE = frozenset({"STACK_GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"})


def load_pickle(file: Path, *, map_location: str) -> dict[str, Tensor]:
    """Load a dict of tensors, mapped from the file where its format allows it."""
    zipped = _look_through(file)
    loaded = torch.load(file, map_location=map_location, weights_only=True, mmap=zipped)
    if not isinstance(loaded, dict):
        raise LoadError(f"{file} holds {type(loaded).__name__}, not a dict of tensors", hint=_OTHER)
    strange = [_shown(name) for name, value in loaded.items() if not _is_entry(name, value)]
    if strange:
        raise LoadError(
            f"{file} holds {len(strange)} entries that are no tensors: {', '.join(strange[:20])}",
            hint=_OTHER,
        )
    return loaded


def _is_entry(name: object, value: object) -> bool:
    return isinstance(name, str) and name.isprintable() and isinstance(value, Tensor)


def _look_through(file: Path) -> bool:
    """Refuse what a file of weights doesn't hold; return whether it is a zip archive."""
    with open_regular(file) as opened:
        start = opened.read(len(_ZIP_START))
        opened.seek(0)
        if start != _ZIP_START:
            _look_through_old(file, opened)
            return False
        if not zipfile.is_zipfile(opened):
            raise LoadError(f"{file} is cut off: it has no end", hint=_CUT_OFF)
        with zipfile.ZipFile(opened) as archive:
            _look_through_archive(file, archive)
    return True


def _look_through_archive(file: Path, archive: zipfile.ZipFile) -> None:
    size = file.stat().st_size
    entries = archive.infolist()
    squeezed = [e.filename for e in entries if e.compress_type != zipfile.ZIP_STORED]
    declared = sum(entry.file_size for entry in entries)
    if squeezed or declared > size:
        what = f"{squeezed[0]!r} in it is compressed" if squeezed else f"it declares {declared}"
        raise LoadError(
            f"{file} has {size} bytes, and {what}: PyTorch writes no such file", hint=_ORDER
        )
    pickles = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
    if len(pickles) != 1 or pickles[0].file_size > _MAX_PICKLE_BYTES:
        raise LoadError(
            f"{file} is no file of PyTorch's: it doesn't hold one data.pkl", hint=_OTHER
        )
    _refuse_code(file, io.BytesIO(archive.read(pickles[0])), size)


def _look_through_old(file: Path, opened: IO[bytes]) -> None:
    # Mapped, because reading "so many bytes" from a file takes that much memory beforehand.
    with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for number in range(_OLD_PICKLES):
            # The first three tell the format and the machine, in numbers that are no sizes.
            _refuse_code(file, content, len(content) if number >= 3 else 2**80)


def _refuse_code(file: Path, content: Any, most: int) -> None:
    """Go through a pickle's instructions without following them."""
    try:
        for instruction, argument, _ in pickletools.genops(content):
            if instruction.name in _STRANGE or (
                instruction.name == "GLOBAL" and not _is_allowed(str(argument))
            ):
                raise LoadError(
                    f"{file} is refused: it asks for {_shown(argument or 'code')}, and weights "
                    "need no code",
                    hint=_ORDER,
                )
            if isinstance(argument, int) and instruction.name.startswith(("BININT", "LONG", "INT")):
                _refuse_size(file, argument, most)
    except (ValueError, IndexError) as error:
        raise pickle.UnpicklingError(str(error)) from error


def _refuse_size(file: Path, size: int, most: int) -> None:
    if size > most:
        raise LoadError(f"{file} declares a size of {size}, and has {most} bytes", hint=_CUT_OFF)


def _is_allowed(name: str) -> bool:
    module, _, attribute = name.partition(" ")
    if name in _ALLOWED or (module == "torch" and attribute.endswith("Storage")):
        return True
    return module == "torch" and isinstance(getattr(torch, attribute, None), torch.dtype)


def _shown(argument: object) -> str:
    return ascii(str(argument).replace(" ", ".")[:80])

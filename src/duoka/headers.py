"""Headers: what the files of a checkpoint say about their tensors, before any is read.

Everything is parsed as if an attacker wrote it: sizes are limited before they are read, names
can't lead out of the directory, and a header must agree with the length of its file. Nothing here
knows which files make a checkpoint.

The safetensors layout follows its published format description: eight bytes with the length of a
JSON header, the header, then the data without holes.
"""

from __future__ import annotations

import math
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CheckpointError, FormatError
from .serial import parse_json_object

MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
MAX_JSON_BYTES = 100_000_000  # an index names every tensor; the longest known are some 10 MB
INCOMPLETE = "the download may be incomplete: fetch it again"

# safetensors' name of a type → torch's name, bits of one element
_DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F4": ("float4_e2m1fn_x2", 4),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,200}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a checkpoint.

    Parameters
    ----------
    name : str
        The checkpoint's own key.
    dtype : str or None
        torch's name of the type, like "bfloat16". None when only the name is known.
    shape : tuple of int or None
    nbytes : int or None
    file : Path or None
        Where it lies; None when the file isn't there.
    """

    name: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    nbytes: int | None = None
    file: Path | None = None


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that must hold one JSON object.

    Raises
    ------
    CheckpointError
        If it can't be read, is too long, or holds something else.
    """
    try:
        size = regular_size(path)
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {size} bytes; at most {MAX_JSON_BYTES} are read")
        return parse_json_object(path.read_bytes(), str(path))
    except FormatError as error:
        raise CheckpointError(str(error), hint=INCOMPLETE) from error
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error


def regular_size(path: Path) -> int:
    """Bytes of a regular file; opening a pipe in its place would wait for ever."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    return status.st_size


def read_index(path: Path, *, suffix: str) -> dict[str, str]:
    """Read which file of a sharded checkpoint holds which tensor.

    Parameters
    ----------
    path : Path
        The index.
    suffix : str
        What the names of the files must end in, like ".bin".

    Returns
    -------
    dict of str to str
        Tensor → name of a file in the index's directory.

    Raises
    ------
    CheckpointError
        If it lists no tensor, or a file elsewhere.
    """
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map", hint=INCOMPLETE)
    for key, file in weight_map.items():
        plain = isinstance(file, str) and _PLAIN_NAME.fullmatch(file) and file.endswith(suffix)
        if not plain:
            raise CheckpointError(
                f"{path} puts {key!r} into {str(file)[:80]!r}, which is not the name of a "
                f"{suffix} file beside it"
            )
    return weight_map


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read what a safetensors file holds, by name; no data is read.

    Raises
    ------
    CheckpointError
        If it can't be read, or the header is damaged or disagrees with the file's length.
    """
    try:
        header, data_bytes = _read_header_json(path)
    except FormatError as error:
        raise CheckpointError(str(error), hint=INCOMPLETE) from error
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror}") from error
    header.pop("__metadata__", None)
    entries = [_read_entry(path, name, entry) for name, entry in header.items()]
    _check_layout(path, entries, data_bytes=data_bytes)
    return {tensor.name: tensor for _, tensor in entries}


def _read_header_json(path: Path) -> tuple[dict[str, Any], int]:
    """The header, and how many bytes of data follow it."""
    size = regular_size(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path} is no safetensors file, or cut off: its header should have {length} "
                f"bytes; the file has {size}, and at most {MAX_HEADER_BYTES} are read",
                hint=INCOMPLETE,
            )
        return parse_json_object(file.read(length), f"the header of {path}"), size - 8 - length


def _read_entry(path: Path, name: str, entry: object) -> tuple[int, TensorInfo]:
    """Where a tensor starts in the data, and what it is."""
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(stop)]}:
            pass
        case _:
            raise CheckpointError(f"{path} doesn't describe the tensor {name!r} in its header")
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"{path} holds {name!r} as {dtype[:40]!r}, a type that duoka doesn't know",
            hint=f"known are {', '.join(_DTYPES)}",
        )
    torch_name, bits = _DTYPES[dtype]
    if len(shape) > 64 or not all(type(length) is int and 0 <= length < 2**63 for length in shape):
        raise CheckpointError(f"{path} gives {name!r} a shape that no tensor can have")
    nbytes = -(-math.prod(shape) * bits // 8)
    if start < 0 or stop - start != nbytes:
        raise CheckpointError(
            f"{path} gives {name!r} the bytes {start} to {stop}; its shape and type need {nbytes}"
        )
    return start, TensorInfo(
        name=name, dtype=torch_name, shape=tuple(shape), nbytes=nbytes, file=path
    )


def _check_layout(
    path: Path, entries: Iterable[tuple[int, TensorInfo]], *, data_bytes: int
) -> None:
    """Refuse data that overlaps, has holes, or ends elsewhere than the file does."""
    stop = 0
    for start, tensor in sorted(entries, key=lambda entry: (entry[0], entry[1].nbytes)):
        if start != stop:
            problem = "overlaps the tensor before it" if start < stop else "follows a hole"
            raise CheckpointError(f"{path} is damaged: {tensor.name!r} {problem}")
        stop = start + (tensor.nbytes or 0)
    if stop != data_bytes:
        problem = "is cut off" if stop > data_bytes else "has bytes that belong to no tensor"
        raise CheckpointError(
            f"{path} {problem}: its tensors have {stop} bytes, and it holds {data_bytes}",
            hint=INCOMPLETE,
        )

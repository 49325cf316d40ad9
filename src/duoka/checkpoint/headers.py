"""Headers: the tensors that a checkpoint's files declare, read before any tensor data.

Everything is parsed as untrusted input: sizes are limited before anything is read, names can't
lead out of the directory, and a header must agree with the length of its file. The rules are the
same for headers from a disk and from a server.

The layout follows the published description of safetensors: eight bytes with the length of a JSON
header, the header, then the data without holes. `safetensors.safe_open` is seven times as fast, but
exposes no offsets, accepts doubled keys and control characters in names, and needs the whole file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from duoka.base.files import open_regular, read_bytes, why
from duoka.base.serialization import parse_json_object
from duoka.errors import CheckpointError, FormatError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
MAX_JSON_BYTES = 100_000_000  # an index names every tensor; the longest known are some 10 MB
# A short text can need much memory ("[[],[],…"). This limit allows 500,000 tensors, three times as
# many as the largest published models have.
MAX_JSON_VALUES = 4_000_000
MAX_NAME_LENGTH = 1024
_MAX_DIMENSIONS = 64  # torch's own limit
INCOMPLETE = "the download may be incomplete: download the file again"
UNREADABLE = "check the permissions of the file"
DAMAGED = "the file is damaged or forged: download it again from a source that you trust"

# safetensors' name of a type → torch's name, bits of one element
_DTYPES: dict[str, tuple[str, int]] = {
    "BOOL": ("bool", 8),
    **{f"U{bits}": (f"uint{bits}", bits) for bits in (8, 16, 32, 64)},
    **{f"I{bits}": (f"int{bits}", bits) for bits in (8, 16, 32, 64)},
    **{f"F{bits}": (f"float{bits}", bits) for bits in (16, 32, 64)},
    "F4": ("float4_e2m1fn_x2", 4),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "BF16": ("bfloat16", 16),
    "C64": ("complex64", 64),
}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,200}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor of a checkpoint, under the checkpoint's own key; unknown fields are None.

    `dtype` is torch's name of the type, like "bfloat16"; `file` the path, perhaps not downloaded
    yet; `offset` the tensor's first byte in the file.
    """

    name: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    nbytes: int | None = None
    file: Path | None = None
    offset: int | None = None


class Index(NamedTuple):
    """Plain file names by tensor, and the declared size of all tensors, not always correct."""

    files: dict[str, str]
    total_bytes: int | None


def read_json(path: Path, *, most_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object from a file."""
    with reading(path):
        return parse_json(read_bytes(path, most_bytes=most_bytes), str(path))


def parse_json(content: bytes, source: str) -> dict[str, Any]:
    """Parse a JSON object in UTF-8, with at most `MAX_JSON_VALUES` values."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{source} is not UTF-8: {error}", hint=INCOMPLETE) from error
    # An upper bound before parsing: each value but the outermost follows a comma or an opening
    # bracket.
    values = text.count(",") + text.count("[") + text.count("{")
    if values > MAX_JSON_VALUES:
        raise CheckpointError(
            f"{source} has {values} values; at most {MAX_JSON_VALUES} are read", hint=DAMAGED
        )
    try:
        return parse_json_object(text, source)
    except FormatError as error:
        raise CheckpointError(str(error), hint=INCOMPLETE) from error


@contextmanager
def reading(path: Path, hint: str = DAMAGED) -> Iterator[None]:
    """Translate errors of reading a file into CheckpointError; `hint` is for irregular files."""
    try:
        yield
    except (OSError, ValueError) as error:
        hint = UNREADABLE if isinstance(error, OSError) else hint
        raise CheckpointError(f"{path} can't be read: {why(error)}", hint=hint) from error


def is_plain_name(name: object) -> bool:
    """Return True for a file name without separators or a leading dot, safe to join to a path."""
    return isinstance(name, str) and _PLAIN_NAME.fullmatch(name) is not None


def read_index(path: Path, *, suffix: str) -> Index:
    """Read the index of a sharded checkpoint; file names must end with `suffix`."""
    content = read_json(path)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map", hint=INCOMPLETE)
    for key, file in weight_map.items():
        _check_name(path, key)
        if not (is_plain_name(file) and file.endswith(suffix)):
            problem = f"assigns {key!r} to {str(file)[:80]!r}, which is not the name of a {suffix}"
            raise _damaged(path, f"{problem} file beside it")
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Index(files=weight_map, total_bytes=total if type(total) is int and total > 0 else None)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file; return its tensors by name."""
    with reading(path), open_regular(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        length = header_length(file.read(LENGTH_BYTES), size, str(path))
        return parse_header(file.read(length), size - LENGTH_BYTES - length, path)


def header_length(start: bytes, size: int, source: str) -> int:
    """Return the length in bytes of a safetensors header, from the first bytes of the file."""
    length = int.from_bytes(start, "little")
    if len(start) < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{source} is not a safetensors file, or is truncated: its header length is {length} "
            f"bytes, the file has {size}, and at most {MAX_HEADER_BYTES} are read",
            hint=INCOMPLETE,
        )
    return length


# A file of two tensors, "a" of 2 float32 and "b" of 3 float16:
#
#   offset  0         8                                             8+H      8+H+8      8+H+14
#           | H (u64) | {"a": {..."data_offsets": [0, 8]}, "b": …}  | a: 8 B | b: 6 B   |
#
# Offsets count from the end of the header. In the order of their offsets the tensors must follow
# one another without gaps, up to the last byte of the file. This detects a truncated file, and one
# with inserted or removed bytes.
def parse_header(text: bytes, data_bytes: int, path: Path) -> dict[str, TensorInfo]:
    """Parse a safetensors header, `text`, before `data_bytes` of data; return tensors by name."""
    if text[:1] != b"{":
        raise _damaged(path, "is not a safetensors file: its header doesn't begin with '{'")
    header = parse_json(text, f"the header of {path}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(path, "has metadata that is not a map of strings")
    entries = [_read_entry(path, name, entry) for name, entry in header.items()]
    _check_layout(path, entries, data_bytes)
    data_offset = LENGTH_BYTES + len(text)
    return {tensor.name: replace(tensor, offset=data_offset + start) for start, tensor in entries}


def _damaged(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{path} {problem}", hint=DAMAGED)


def _check_name(path: Path, name: str) -> None:
    # Names appear in messages: control characters must not reach a terminal.
    if len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise _damaged(path, f"names a tensor {name[:80]!a}, which is not a valid tensor name")


def _read_entry(path: Path, name: str, entry: object) -> tuple[int, TensorInfo]:
    """Validate a tensor's entry; return its offset in the data, and the tensor."""
    _check_name(path, name)
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop]} if (
            type(start) is int and type(stop) is int  # True is an int, and no offset
        ):
            pass
        case _:
            raise _damaged(path, f"has an invalid description of the tensor {name!r} in its header")
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"{path} holds {name!r} as {dtype[:40]!r}, an unsupported type",
            hint=f"supported: {', '.join(_DTYPES)}",
        )
    torch_name, bits = _DTYPES[dtype]
    are_sizes = all(type(length) is int and 0 <= length < 2**63 for length in shape)
    if len(shape) > _MAX_DIMENSIONS or not are_sizes:
        raise _damaged(path, f"gives {name!r} an invalid shape")
    nbytes, rest = divmod(math.prod(shape) * bits, 8)
    if start < 0 or stop - start != nbytes or rest:
        span = f"the bytes {start} to {stop}; its shape and type need {nbytes}"
        raise _damaged(path, f"gives {name!r} {span}")
    dims = tuple(shape)
    return start, TensorInfo(name=name, dtype=torch_name, shape=dims, nbytes=nbytes, file=path)


def _check_layout(path: Path, entries: list[tuple[int, TensorInfo]], data_bytes: int) -> None:
    """Refuse overlaps, gaps, and data that doesn't end with the file."""
    # An empty tensor begins where the next one does. With the size as second key it comes first:
    # [0, 0], then [0, 8], which is no overlap.
    stop = 0
    for start, tensor in sorted(entries, key=lambda entry: (entry[0], entry[1].nbytes)):
        if start != stop:
            problem = "overlaps the previous tensor" if start < stop else "is preceded by a gap"
            raise _damaged(path, f"is damaged: {tensor.name!r} {problem}")
        stop = start + (tensor.nbytes or 0)
    if stop != data_bytes:
        problem = "is truncated" if stop > data_bytes else "has bytes outside all tensors"
        raise CheckpointError(
            f"{path} {problem}: its tensors have {stop} bytes, and it holds {data_bytes}",
            hint=INCOMPLETE,
        )

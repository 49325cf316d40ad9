"""Units: sizes, counts and times as text ("24GiB") and as numbers (bytes)."""

from __future__ import annotations

import re
from math import floor, log10

from duoka.errors import UsageError

MIB = 2**20
GIB = 2**30
_UNIT_BYTES = {
    "B": 1,
    "KIB": 2**10,
    "MIB": MIB,
    "GIB": GIB,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_OF_MEMORY = re.compile(r"(?<=[\d\s])([KMGT])B?(?=\s*$)", re.ASCII | re.IGNORECASE)
_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(text: str) -> int:
    """Parse a size: a number and a unit, in powers of 1024 (``GiB``) or of 1000 (``GB``)."""
    match = _SIZE.fullmatch(text)
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _UNIT_BYTES:
        raise UsageError(
            f"{text!r} is not a size", hint="write a number with a unit: 24GiB, 512MiB or 80GB"
        )
    size = int(float(match.group(1)) * _UNIT_BYTES[unit])
    if size <= 0:
        raise UsageError(f"{text!r} is not a positive size", hint="the smallest size is 1B")
    return size


def parse_memory(text: str) -> int:
    """Parse a memory size as GPU makers write it: 24G, 24GB and 24GiB are all 24 x 1024³ bytes."""
    return parse_bytes(_OF_MEMORY.sub(r"\1iB", text))


def exact_bytes(num_bytes: int) -> str:
    """Format a size without rounding, so that `parse_bytes` returns the same number."""
    for unit in ("GiB", "MiB", "KiB"):
        count, rest = divmod(num_bytes, _UNIT_BYTES[unit.upper()])
        if not rest:
            return f"{count}{unit}"
    return f"{num_bytes}B"


def format_count(number: int, noun: str) -> str:
    """Format a number and a noun, in the plural unless the number is 1."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def unit_for(largest_bytes: int) -> tuple[str, int]:
    """Return the unit for a table whose largest size is `largest_bytes`, and the unit's bytes."""
    for unit in ("GiB", "MiB"):
        if largest_bytes >= _UNIT_BYTES[unit.upper()]:
            return unit, _UNIT_BYTES[unit.upper()]
    return "KiB", _UNIT_BYTES["KIB"]


def format_bytes(num_bytes: int) -> str:
    """Format a size for people, in powers of 1024."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_roughly(number: float) -> str:
    """Format a number with two significant digits."""
    if not number:
        return "0"
    digits = max(1 - floor(log10(abs(number))), -15)
    rounded = round(number, digits)
    return f"{rounded:,.{max(digits, 0)}f}"


def format_seconds(seconds: float) -> str:
    """Format a time with two significant digits."""
    if seconds < 0.1:
        return f"{format_roughly(seconds * 1e3)} ms"
    return (
        f"{format_roughly(seconds)} s" if seconds < 100 else f"{format_roughly(seconds / 60)} min"
    )

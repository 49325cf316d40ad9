"""Files of records, each a name and lines of text, and what is taken out of texts before."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ONLY = "DUOKA_GOLDEN_ONLY"
_HEAD = re.compile(r"^=== (.*)\n", re.MULTILINE)
_DIGITS = 9
_MOST_LINES = 10


def is_wanted(name: str) -> bool:
    """Whether a record is to be made."""
    return os.environ.get(ONLY, "") in name


def write(path: Path, content: Mapping[str, str]) -> None:
    """Write records to a file."""
    texts = (f"=== {name}\n{_escaped(text.rstrip())}\n" for name, text in content.items())
    path.write_text("".join(texts), encoding="utf-8")


def read(path: Path) -> dict[str, str]:
    """Read the records of a file; none of one that isn't there."""
    if not path.exists():
        return {}
    _, *parts = _HEAD.split(path.read_text(encoding="utf-8"))
    return {name: text.rstrip("\n") for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _escaped(text: str) -> str:
    """Text without spaces at the ends of its lines, none of which begins a record."""
    lines = (line.rstrip() for line in text.split("\n"))
    return "\n".join(f" {line}" if line.startswith("=== ") else line for line in lines)


def shortened(text: str) -> str:
    """A text of many lines by its first ones, and a hash of all."""
    lines = text.splitlines()
    return "\n".join([*lines[:_MOST_LINES], f"… {len(lines)} lines, {digest(text)}"])


def digest(value: Any) -> str:
    """A hash of JSON data, whose real numbers count to nine digits."""
    text = json.dumps(rounded(value, _DIGITS), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def rounded(value: Any, digits: int) -> Any:
    """JSON data with real numbers of so many digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    return [rounded(item, digits) for item in value] if isinstance(value, list) else value


def normalised(text: str, **places: Path | str) -> str:
    """Text without directories, versions and kernel of this run; `places` are named in capitals."""
    found = {str(path): f"<{name}>" for name, path in places.items()}
    found[tempfile.gettempdir()] = "<tmp>"
    found[str(Path(__file__).resolve().parents[2])] = "<repository>"
    for path in sorted(found, key=len, reverse=True):
        text = text.replace(path, found[path])
    for package in ("torch", "transformers", "duoka"):
        text = re.sub(rf"\b{package}([ =/\"':]+){re.escape(version(package))}",
                      rf"{package}\1<version>", text)  # fmt: skip
    return text.replace(platform.python_version(), "<version>").replace(
        platform.platform(), "<kernel>"
    )

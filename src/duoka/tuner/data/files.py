"""Read files of training data row by row; `rows` interprets each row."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from duoka.base.files import open_regular, read_bytes, reading, why
from duoka.base.progress import say_import
from duoka.base.requirements import require_package
from duoka.base.serialization import parse_json_object
from duoka.errors import FormatError, UsageError

from .rows import Document

_LINES = (".jsonl", ".json")
_TABLES = (".csv", ".parquet")
_TEXTS = (".txt", ".md")
_SUFFIXES = (*_LINES, *_TABLES, *_TEXTS)
_HINT = f"supported suffixes: {', '.join(_SUFFIXES)}"
_WEIGHTED = re.compile(r"(.+)=(-?\d+\.?\d*|-?\.\d+)", re.ASCII)
_LEAST_WEIGHT, _MOST_WEIGHT = 0.001, 1000
_MOST_LINE_BYTES = 1 << 26
_MOST_LIST_BYTES = 1 << 30
_PIECE_CHARACTERS = 1 << 20
_ROWS_AT_A_TIME = 1024
_DAMAGED = "the table can't be read from here on"


class DataRow(NamedTuple):
    """The content of a row and its line, or the reason why the row is unreadable."""

    line: int
    value: Mapping[str, Any] | Document
    problem: str = ""


def split_weight(path: str | Path) -> tuple[Path, float]:
    """Split FILE=WEIGHT; the weight of a plain path is 1."""
    match = _WEIGHTED.fullmatch(str(path))
    with reading(Path(path), _HINT):
        if match is None or Path(path).exists():
            return Path(path), 1.0
    name, weight = match.groups()
    if not _LEAST_WEIGHT <= float(weight) <= _MOST_WEIGHT:
        hint = f"{name}=2 takes each sample twice per epoch, {name}=0.5 half of them"
        limits = f"from {_LEAST_WEIGHT} to {_MOST_WEIGHT}"
        raise UsageError(f"the weight of {name} is {weight}; it must be {limits}", hint=hint)
    return Path(name), float(weight)


def data_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the given files, and the data files in given directories in alphabetical order."""
    files: list[Path] = []
    for path in map(Path, paths):
        with reading(path, _HINT):
            children = _files_inside(path) if path.is_dir() else [path] if path.exists() else []
        if not children:
            raise UsageError(f"no training data at {path}", hint=_HINT)
        if path.suffix not in _SUFFIXES and children == [path]:
            raise UsageError(f"{path} is not a supported data file", hint=_HINT)
        files += children
    return files


def _files_inside(directory: Path) -> list[Path]:
    """Return the data files of a directory; text files only if there are no others."""
    files = [file for file in sorted(directory.rglob("*")) if file.is_file()]
    rows = [file for file in files if file.suffix in (*_LINES, *_TABLES)]
    return rows or [file for file in files if file.suffix in _TEXTS]


def read_rows(path: Path, *, by_line: bool = False) -> Iterator[DataRow]:
    """Yield the rows of a file with their line numbers (for Parquet and JSON lists, indices).

    A text file is a document or, with `by_line`, has a question in each line.
    """
    reader = _READERS.get(path.suffix, _line_rows)
    try:
        yield from (_question_rows if by_line and reader is _text_rows else reader)(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read: {why(error)}") from error
    except RecursionError as error:
        raise UsageError(f"{path} can't be read: it is nested too deeply") from error


def _line_rows(path: Path) -> Iterator[DataRow]:
    """Yield a row for each line with a JSON object; skip empty lines."""
    with open_regular(path) as file:
        number = 0
        while line := file.readline(_MOST_LINE_BYTES):
            number += 1
            if len(line) == _MOST_LINE_BYTES and not line.endswith(b"\n"):
                while (more := file.readline(_MOST_LINE_BYTES)) and not more.endswith(b"\n"):
                    pass
                yield DataRow(number, {}, f"the line has more than {_MOST_LINE_BYTES} bytes")
                continue
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield DataRow(number, parse_json_object(text, "the line"))
            except UnicodeDecodeError as error:
                yield DataRow(number, {}, why(error))
            except FormatError as error:
                yield DataRow(number, {}, str(error))


def _json_rows(path: Path) -> Iterator[DataRow]:
    """Yield the items of a JSON list, or of JSON lines if the file doesn't begin with a list."""
    with open_regular(path) as file:
        start = file.read(1 << 12).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not start.startswith(b"["):
        yield from _line_rows(path)
        return
    for number, item in enumerate(json.loads(read_bytes(path, most_bytes=_MOST_LIST_BYTES)), 1):
        problem = "" if isinstance(item, dict) else "the item is not an object"
        yield DataRow(number, {} if problem else item, problem)


def _text_rows(path: Path) -> Iterator[DataRow]:
    """Yield a text file as one document, read lazily in pieces that end at line ends."""

    def pieces() -> Iterator[str]:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
            while piece := file.read(_PIECE_CHARACTERS):
                yield piece + file.readline(_PIECE_CHARACTERS)

    yield DataRow(1, Document(pieces()))


def _question_rows(path: Path) -> Iterator[DataRow]:
    """Yield each line of a text file as a question; skip empty lines."""
    with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig") as file:
        lines = ((number, line.strip()) for number, line in enumerate(file, start=1))
        yield from (DataRow(number, {"query": line}) for number, line in lines if line)


def _csv_rows(path: Path) -> Iterator[DataRow]:
    """Yield the rows of a CSV table; the first line has the column names, values are strings."""
    with io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, strict=True)
        names: list[str] = []
        line = 1
        try:
            for fields in reader:
                if not names:
                    names = fields
                elif fields and len(fields) != len(names):
                    problem = f"it has {len(fields)} fields; the first line has {len(names)}"
                    yield DataRow(line, {}, problem)
                elif fields:
                    yield DataRow(line, dict(zip(names, fields, strict=True)))
                line = reader.line_num + 1
        except (csv.Error, UnicodeDecodeError) as error:
            yield DataRow(line, {}, f"{_DAMAGED}: {error}")


def _parquet_rows(path: Path) -> Iterator[DataRow]:
    """Yield the rows of a Parquet table."""
    say_import("pyarrow")
    require_package("pyarrow", f"{path} needs")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        with open_regular(path) as file, ParquetFile(file) as table:
            for batch in table.iter_batches(_ROWS_AT_A_TIME):
                for value in batch.to_pylist():
                    number += 1
                    yield DataRow(number, value)
    except (ArrowException, OSError, ValueError) as error:
        yield DataRow(number + 1, {}, f"{_DAMAGED}: {str(error).strip()}")


_READERS: dict[str, Callable[[Path], Iterator[DataRow]]] = {
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
    **dict.fromkeys(_TEXTS, _text_rows),
}

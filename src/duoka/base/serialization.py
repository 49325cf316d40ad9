"""JSON form of frozen dataclasses: typed, strict, with the path of an invalid field.

What a stage passes to the next one (a profile, a plan) is a tree of frozen dataclasses. The JSON
form has one key per field and nothing else. A field that is unknown, missing or of another type is
an error with the field's path, as in ``Plan.forecast.devices[1].weight_bytes``, so that a file of
another version is never partly accepted. Only a field with the metadata `OMIT_DEFAULT` is left out
at its default and may be missing, so that older files stay valid. Callers read and write the files
and check versions.

Each annotation is compiled once into a function from JSON value to Python value (`_reader`);
containers call the functions of their items.
"""

from __future__ import annotations

import json
import math
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union

from duoka.errors import DuokaError, FormatError

OMIT_DEFAULT: Mapping[str, bool] = {"omit_default": True}
"""Metadata of a dataclass field whose default value is left out of the JSON form."""

T = TypeVar("T")
_Reader = Callable[[object], object]
_HINT = "the file is damaged, or was written by another version of duoka; create it again"


class _Mismatch(Exception):
    """Raised for a value that doesn't match its annotation.

    `path` leads to the value; each enclosing container puts its own step in front.
    """

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = path


def to_dict(value: object) -> Any:
    """Convert a dataclass and all nested values to dicts, lists and scalars for `json.dumps`."""
    if is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: to_dict(item)
            for field in fields(value)
            if (item := getattr(value, field.name)) != field.default or not is_optional(field)
        }
    if isinstance(value, Mapping):
        assert all(isinstance(key, str) for key in value), "JSON keys must be strings"
        return {key: to_dict(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [to_dict(item) for item in value]
    assert value is None or isinstance(value, (str, int, float)), (
        f"not representable as JSON: {type(value)}"
    )
    assert not isinstance(value, float) or math.isfinite(value), (
        "JSON doesn't allow infinity or NaN"
    )
    return value


def is_optional(field: Field[Any]) -> bool:
    """Return True if the JSON form leaves out the field at its default."""
    return bool(field.metadata.get("omit_default"))


def from_dict(cls: type[T], data: object) -> T:
    """Build a dataclass from its JSON form; raise FormatError with the path of an invalid field."""
    try:
        return typing.cast(T, _reader(typing.cast(Any, cls))(data))
    except _Mismatch as mismatch:
        step = f"{cls.__name__}{mismatch.path}"
        raise FormatError(f"{step}: {mismatch.problem}", hint=_HINT) from mismatch


def parse_json_object(text: str | bytes, source: str) -> dict[str, Any]:
    """Parse a JSON object from untrusted text: no doubled keys, no infinities, no NaN."""
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise FormatError(f"{source} is not valid JSON: {problem}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{source} contains a JSON {_kind_of(value)}; expected an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Convert a JSON object's pairs to a dict; raise ValueError for a key that occurs twice."""
    # Python keeps the last of two equal keys, other parsers the first: one file, two meanings.
    distinct = dict(pairs)
    if len(distinct) < len(pairs):
        ((doubled, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {doubled[:80]!r} occurs twice")
    return distinct


def _finite(text: str) -> float:
    """Parse a float; raise ValueError for numbers too large for 64 bits."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} doesn't fit in 64 bits")
    return number


def _no_constant(name: str) -> float:
    """Raise ValueError: Python's parser accepts NaN and Infinity, JSON doesn't."""
    raise ValueError(f"{name} is not a JSON number")


# Readers of a small tree, as they are built by annotation:
#
#   Plan           object → {"devices": …, "note": …} → Plan(**values)
#   devices        tuple[Device, ...]   list → each item by Device's reader
#   note           str | None           null → None, otherwise text
#
# A mismatch is raised as `_Mismatch`, and every enclosing container prepends its step to the path.
# So the path is computed only for an error.
@cache
def _reader(hint: Any) -> _Reader:
    """Compile an annotation into a reader: a function that converts and validates a JSON value."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        return _dataclass_reader(typing.cast(type, hint))
    if hint in _SCALARS:
        return _scalar_reader(hint)
    if origin is Literal:
        return _literal_reader(arguments)
    if origin in (Union, types.UnionType):
        return _union_reader(arguments)
    if origin is tuple:
        return _tuple_reader(arguments)
    assert origin in (dict, Mapping), f"no JSON form for {hint}"
    assert arguments[0] is str, "JSON keys must be strings"
    reader = _reader(arguments[1])
    return lambda data: {
        key: _read_at("[{!r}]", key, reader, item) for key, item in _items(data).items()
    }


_SCALARS = {
    str: "a text",
    int: "an integer",
    bool: "true or false",
    type(None): "null",
    float: "a finite number",
}


def _scalar_reader(kind: Any) -> _Reader:
    """Return the reader of a scalar of exactly this type; an integer is accepted for float."""

    def read(data: Any) -> object:
        if kind is float and type(data) is int and abs(data) <= sys.float_info.max:
            return float(data)
        # Exact types, because a bool is an instance of int.
        if type(data) is not kind or (kind is float and not math.isfinite(data)):
            raise _Mismatch(f"expected {_SCALARS[kind]}, got {_describe(data)}")
        if kind is int and not -(2**63) <= data < 2**63:  # division of larger ones can overflow
            raise _Mismatch(f"expected an integer of 64 bits, got {_describe(data)}")
        return data

    return read


def _literal_reader(choices: tuple[object, ...]) -> _Reader:
    """Return the reader of a value that must equal one of the choices, in type and value."""

    def read(data: object) -> object:
        for choice in choices:
            if type(data) is type(choice) and data == choice:
                return choice
        expected = ", ".join(map(repr, choices))
        raise _Mismatch(f"expected one of {expected}, got {_describe(data)}")

    return read


def _union_reader(members: tuple[Any, ...]) -> _Reader:
    """Return the reader of a union: the first member whose reader accepts the value."""
    optional = type(None) in members
    readers = [_reader(member) for member in members if member is not type(None)]

    def read(data: object) -> object:
        if data is None and optional:
            return None
        if len(readers) == 1:
            return readers[0](data)
        problems = []
        for reader in readers:
            try:
                return reader(data)
            except _Mismatch as mismatch:
                problems.append(mismatch.problem)
        raise _Mismatch("; ".join(problems))

    return read


def _read_at(form: str, step: object, reader: _Reader, data: object) -> object:
    """Read an item of a container; prepend the item's step to the path of a mismatch.

    `form` formats the step from the item's index, key or field name, as "[{}]" or ".{}".
    """
    try:
        return reader(data)
    except _Mismatch as mismatch:
        raise _Mismatch(mismatch.problem, form.format(step) + mismatch.path) from None


def _tuple_reader(arguments: tuple[Any, ...]) -> _Reader:
    """Return the reader of ``tuple[T, ...]`` (any length) or ``tuple[T, U]`` (exactly two)."""
    has_any_length = arguments[1:] == (Ellipsis,)
    readers = [_reader(argument) for argument in arguments[: 1 if has_any_length else None]]

    def read(data: object) -> object:
        if not isinstance(data, list):
            raise _Mismatch(f"expected a list, got {_describe(data)}")
        item_readers = readers * len(data) if has_any_length else readers
        if len(item_readers) != len(data):
            raise _Mismatch(f"expected {len(item_readers)} items, got {len(data)}")
        pairs = enumerate(zip(item_readers, data, strict=True))
        return tuple(_read_at("[{}]", index, reader, item) for index, (reader, item) in pairs)

    return read


def _dataclass_reader(cls: type) -> _Reader:
    """Return the reader of an object with the fields of a dataclass, optional ones if present."""
    hints = typing.get_type_hints(cls)
    readers = {field.name: _reader(hints[field.name]) for field in fields(cls)}
    required = [field.name for field in fields(cls) if not is_optional(field)]

    def read(data: object) -> object:
        items = _items(data)
        for name in (*items, *required):
            if name not in readers or name not in items:
                problem = "unknown field" if name in items else "the field is missing"
                raise _Mismatch(problem, f".{name}")
        values = {name: _read_at(".{}", name, readers[name], items[name]) for name in items}
        try:
            return cls(**values)
        except (DuokaError, AssertionError, ValueError) as error:
            # The dataclass validates its values on construction: here the file's values are wrong.
            raise _Mismatch(str(error) or "the values contradict each other") from error

    return read


def _items(data: object) -> dict[str, object]:
    if not isinstance(data, dict):
        raise _Mismatch(f"expected an object, got {_describe(data)}")
    return data


_KINDS = {dict: "object", list: "list", str: "text", bool: "boolean", type(None): "null"}


def _kind_of(data: object) -> str:
    return _KINDS.get(type(data), "number")


def _describe(data: object) -> str:
    text = repr(data)
    return _kind_of(data) + " " + (text if len(text) <= 40 else text[:37] + "...")

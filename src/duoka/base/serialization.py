"""The JSON form of duoka's frozen data: dataclass ↔ dict, typed and strict.

What a stage hands to the next one (a profile, a plan) is a tree of frozen dataclasses. Its JSON
form has one key per field and nothing else. Reading believes nothing: a field that is unknown,
missing or of another type is an error that names the field's path, so that a file of another
version never half-fits. It knows nothing of files or of versions; who writes a file adds those.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union

from duoka.errors import DuokaError, FormatError

T = TypeVar("T")
_Reader = Callable[[object], object]
_HINT = "the file is damaged or of another version of duoka; make it again"


class _Mismatch(Exception):
    """A value that doesn't fit; the containers around it prepend their step to the path."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.path = path


def to_dict(value: object) -> Any:
    """Turn a dataclass, and all that it holds, into what `json.dumps` takes."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_dict(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        assert all(isinstance(key, str) for key in value), "JSON has text keys only"
        return {key: to_dict(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [to_dict(item) for item in value]
    assert value is None or isinstance(value, (str, int, float)), f"no JSON form: {type(value)}"
    assert not isinstance(value, float) or math.isfinite(value), "JSON has no infinity and no NaN"
    return value


def from_dict(cls: type[T], data: object) -> T:
    """Build a dataclass from its JSON form."""
    try:
        return typing.cast(T, _reader(typing.cast(Any, cls))(data))
    except _Mismatch as mismatch:
        place = f"{cls.__name__}{mismatch.path}"
        raise FormatError(f"{place}: {mismatch.problem}", hint=_HINT) from mismatch


def parse_json_object(text: str | bytes, source: str) -> dict[str, Any]:
    """Parse text that must be one JSON object, as if an attacker wrote it."""
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite
        )
    except (ValueError, RecursionError) as error:
        problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise FormatError(f"{source} is not valid JSON: {problem}") from error
    if not isinstance(value, dict):
        raise FormatError(f"{source} holds a JSON {_kind_of(value)}; an object is needed")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps the last of equal keys; two readers that keep different ones can be told
    # different things by one file.
    distinct = dict(pairs)
    if len(distinct) < len(pairs):
        ((doubled, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key {doubled[:80]!r} stands twice")
    return distinct


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:20]} is larger than any number of 64 bits")
    return number


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


@cache
def _reader(hint: Any) -> _Reader:
    """The function that reads one annotation; built once, because profiles hold many values."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        return _dataclass_reader(typing.cast(type, hint))
    if hint in (str, int, float, bool, type(None), None):
        return _SCALARS[type(None) if hint is None else hint]
    if origin is Literal:
        return _literal_reader(arguments)
    if origin in (Union, types.UnionType):
        return _union_reader(arguments)
    if origin is tuple:
        return _tuple_reader(arguments)
    assert origin in (dict, Mapping), f"no JSON form for {hint}"
    assert arguments[0] is str, "JSON has text keys only"
    return _mapping_reader(arguments[1])


def _scalar_reader(kind: type, name: str) -> _Reader:
    def read(data: object) -> object:
        if type(data) is not kind:  # bool is an int to isinstance, and must not be one here
            raise _Mismatch(f"expected {name}, got {_describe(data)}")
        return data

    return read


def _read_int(data: object) -> object:
    if type(data) is not int:
        raise _Mismatch(f"expected an integer, got {_describe(data)}")
    if not -(2**63) <= data < 2**63:  # larger ones overflow where they are divided
        raise _Mismatch(f"expected an integer of 64 bits, got {_describe(data)}")
    return data


def _read_float(data: object) -> object:
    if type(data) is float and math.isfinite(data):
        return data
    if type(data) is int:
        try:
            return float(data)
        except OverflowError:
            pass
    raise _Mismatch(f"expected a finite number, got {_describe(data)}")


_SCALARS: dict[type, _Reader] = {
    str: _scalar_reader(str, "a text"),
    int: _read_int,
    bool: _scalar_reader(bool, "true or false"),
    type(None): _scalar_reader(type(None), "null"),
    float: _read_float,
}


def _literal_reader(choices: tuple[object, ...]) -> _Reader:
    def read(data: object) -> object:
        for choice in choices:
            if type(data) is type(choice) and data == choice:
                return choice
        known = ", ".join(map(repr, choices))
        raise _Mismatch(f"expected one of {known}, got {_describe(data)}")

    return read


def _union_reader(members: tuple[Any, ...]) -> _Reader:
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


def _tuple_reader(arguments: tuple[Any, ...]) -> _Reader:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        same = _reader(arguments[0])
        return lambda data: _read_items(data, lambda items: [same] * len(items))
    readers = [_reader(argument) for argument in arguments]
    return lambda data: _read_items(data, lambda items: readers)


def _read_items(data: object, readers_of: Callable[[list[object]], list[_Reader]]) -> object:
    if not isinstance(data, list):
        raise _Mismatch(f"expected a list, got {_describe(data)}")
    readers = readers_of(data)
    if len(readers) != len(data):
        raise _Mismatch(f"expected {len(readers)} items, got {len(data)}")
    done: list[object] = []
    try:
        for reader, item in zip(readers, data, strict=True):
            done.append(reader(item))
    except _Mismatch as mismatch:
        raise _Mismatch(mismatch.problem, f"[{len(done)}]{mismatch.path}") from None
    return tuple(done)


def _mapping_reader(hint: Any) -> _Reader:
    reader = _reader(hint)

    def read(data: object) -> object:
        values: dict[str, object] = {}
        for key, item in _items(data):
            try:
                values[key] = reader(item)
            except _Mismatch as mismatch:
                raise _Mismatch(mismatch.problem, f"[{key!r}]{mismatch.path}") from None
        return values

    return read


def _dataclass_reader(cls: type) -> _Reader:
    hints = typing.get_type_hints(cls)
    readers = {field.name: _reader(hints[field.name]) for field in fields(cls)}

    def read(data: object) -> object:
        values: dict[str, object] = {}
        for name, item in _items(data):
            if name not in readers:
                raise _Mismatch("unknown field", f".{name}")
            try:
                values[name] = readers[name](item)
            except _Mismatch as mismatch:
                raise _Mismatch(mismatch.problem, f".{name}{mismatch.path}") from None
        for name in readers:
            if name not in values:
                raise _Mismatch("the field is missing", f".{name}")
        try:
            return cls(**values)
        except (DuokaError, AssertionError, ValueError) as error:
            # The dataclass checks itself on construction; from a file, that is the file's fault.
            raise _Mismatch(str(error) or "the values contradict each other") from error

    return read


def _items(data: object) -> list[tuple[str, object]]:
    if not isinstance(data, dict):
        raise _Mismatch(f"expected an object, got {_describe(data)}")
    for key in data:
        if not isinstance(key, str):
            raise _Mismatch(f"expected a text as key, got {_describe(key)}")
    return list(data.items())


def _kind_of(data: object) -> str:
    names: dict[type, str] = {
        dict: "object",
        list: "list",
        str: "text",
        bool: "boolean",
        type(None): "null",
    }
    return names.get(type(data), "number")


def _describe(data: object) -> str:
    shown = repr(data)
    return _kind_of(data) + " " + (shown if len(shown) <= 40 else shown[:37] + "...")

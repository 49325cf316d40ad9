"""The JSON Schemas of plans and reports, from the dataclasses themselves.

`make schema` writes the files that are published with the package; tests hold them against this.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union

import duoka
from duoka.base.serialization import is_optional
from duoka.planner import plan
from duoka.report import check_report
from duoka.report.check_report import VERSION, CheckReport

PLAN_FILE = Path(plan.__file__).with_name("plan.schema.json")
REPORT_FILE = Path(check_report.__file__).with_name("report.schema.json")


def plan_schema() -> dict[str, Any]:
    """That of a plan's file."""
    constants = {"format": {"const": "duoka.plan"}, "version": {"const": plan._VERSION}}
    return json_schema(duoka.Plan, title="A plan of duoka", **constants)


def report_schema() -> dict[str, Any]:
    """That of a report's JSON form, and of what `duoka check --fix` adds to it."""
    schema = json_schema(
        CheckReport, title="A report of duoka", version={"const": VERSION}, ok={"type": "boolean"}
    )
    del schema["properties"]["subject"]
    schema["required"].remove("subject")
    schema["properties"] |= {
        "patches": _objects(file="string", diff="string", proved="boolean", reason="string"),
        "cures": _objects(file="string", source="string", step_bytes="integer"),
        "uncured": _objects(file="string", line="integer", op="string", reason="string"),
    }
    return schema


def _objects(**types: str) -> dict[str, Any]:
    """The schema of a list of flat objects."""
    properties = {name: {"type": kind} for name, kind in types.items()}
    required = list(properties)
    item = {"type": "object", "properties": properties, "required": required}
    return {"type": "array", "items": {**item, "additionalProperties": False}}


def json_schema(cls: type, *, title: str, **constants: dict[str, object]) -> dict[str, Any]:
    """Describe a dataclass's JSON form as a JSON Schema, draft 2020-12.

    Notes
    -----
    What the dataclasses check on construction (that a size is positive, that names are known)
    isn't in it, nor that integers have 64 bits.
    """
    definitions: dict[str, Any] = {}
    _schema(cls, definitions)
    root = definitions.pop(cls.__name__)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": title,
        **root,
        "properties": {**constants, **root["properties"]},
        "required": [*constants, *root["required"]],
        "$defs": dict(sorted(definitions.items())),
    }


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of one annotation; dataclasses become definitions."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if is_dataclass(hint):
        return _dataclass_schema(typing.cast(type, hint), definitions)
    if hint in _SCHEMA_TYPES:
        return {"type": _SCHEMA_TYPES[hint]}
    if hint is Any:
        return {}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(argument, definitions) for argument in arguments]}
    if origin is tuple and arguments[-1] is Ellipsis:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if origin is tuple:
        items = [_schema(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    assert origin in (dict, Mapping), f"no JSON form for {hint}"
    return {"type": "object", "additionalProperties": _schema(arguments[1], definitions)}


_SCHEMA_TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    None: "null",
}


def _dataclass_schema(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    if cls.__name__ not in definitions:
        definitions[cls.__name__] = {}  # met again inside itself, it is a reference
        hints = typing.get_type_hints(cls)
        names = [field.name for field in fields(cls)]
        required = [field.name for field in fields(cls) if not is_optional(field)]
        definitions[cls.__name__] = {
            "type": "object",
            "properties": {name: _schema(hints[name], definitions) for name in names},
            "required": required,
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{cls.__name__}"}


if __name__ == "__main__":
    for file, schema in ((PLAN_FILE, plan_schema()), (REPORT_FILE, report_schema())):
        file.write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")

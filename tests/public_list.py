"""What is public of duoka, as a flat list: a key for each thing, with the value that users rely on.

``python tests/public_list.py`` shows what was added, changed and removed since the last release;
with ``--write`` it writes the list of this version to ``tests/public``, for a release.
`test_public` compares the two, and docs/stability.md says what the list promises.
"""

from __future__ import annotations

import argparse
import ast
import enum
import inspect
import json
import sys
import tomllib
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any, cast

import reference
import typer
from packaging.version import Version
from pydantic import BaseModel
from schemas import PLAN_FILE, REPORT_FILE, json_schema
from scripted import ScriptedPool

import duoka
from duoka import pytest_plugin
from duoka.cli import generate
from duoka.cli.main import app
from duoka.hardware.calibration import Calibration
from duoka.hardware.detect import PresentGpu
from duoka.planner.explain import Explanation
from duoka.planner.replicas import Replicas
from duoka.serve.app import make_app
from duoka.serve.metrics import Metrics
from duoka.serve.pool import EnginePool
from duoka.serve.service import Service
from duoka.tools.bench.quality import Quality
from duoka.tools.doctor import Diagnosis
from duoka.tools.top.snapshot import GpuSnapshot
from duoka.tuner import run

ROOT = Path(__file__).resolve().parents[1]
LISTS = ROOT / "tests" / "public"
PAGE = ROOT / "docs" / "stability.md"
# The dataclasses that --json prints.
_PRINTED = {
    "bench --calibrate": Calibration,
    "bench --quality": Quality,
    "doctor": Diagnosis,
    "plan --explain": Explanation,
    "plan --replicas": Replicas,
    "top": GpuSnapshot,
}
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
Item = tuple[str, str]


def public_list() -> dict[str, str]:
    """Everything public, sorted by its key."""
    parts = (_names, _options, _exit_codes, _environment, _json, _metrics, _routes, _package, _runs)
    items = [item for part in parts for item in part()]
    found = dict(items)
    assert len(found) == len(items), "two things have the same key"
    return dict(sorted(found.items()))


def released() -> tuple[str, dict[str, str]]:
    """The version of the last release, and its list."""
    file = max(LISTS.glob("*.json"), key=lambda path: Version(path.stem))
    return file.stem, json.loads(file.read_text(encoding="utf-8"))


def announced() -> dict[str, list[str]]:
    """The keys in the tables of docs/stability.md, by the heading above the table."""
    tables: dict[str, list[str]] = {}
    heading = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            heading = line.strip("# ")
        elif line.startswith("| `"):
            tables.setdefault(heading, []).append(line.split("`")[1])
    return tables


def breaks(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """What a program that works with the old list may trip over."""
    lost = [f"removed: {key} ({value})" for key, value in old.items() if key not in new]
    changed = [
        f"changed: {key} ({value} → {new[key]})"
        for key, value in old.items()
        if new.get(key, value) != value
    ]
    # A new parameter without a default breaks the calls of a function that there was.
    demanded = [
        f"required: {key}"
        for key, value in new.items()
        if key not in old and key.startswith("parameter: ") and value.startswith("required")
        if f"name: {key.removeprefix('parameter: ').partition('(')[0]}" in old
    ]
    return [*lost, *changed, *demanded]


def _names() -> Iterator[Item]:
    """Names of the package, with parameters, fields and members."""
    for name in [*duoka.__all__, "testing"]:
        value = getattr(duoka, name)
        if inspect.ismodule(value):
            yield f"name: duoka.{name}", "module"
            for inner, member in sorted(vars(value).items()):
                if (
                    not inner.startswith("_")
                    and getattr(member, "__module__", "") == value.__name__
                ):
                    yield from _describe(f"duoka.{name}.{inner}", member)
        else:
            yield from _describe(f"duoka.{name}", value)


def _describe(name: str, value: Any) -> Iterator[Item]:
    if not inspect.isclass(value):
        yield f"name: {name}", "function"
        yield from _parameters(name, value)
        return
    bases = [base.__name__ for base in value.__mro__[1:] if base.__module__.startswith("duoka")]
    is_error = issubclass(value, BaseException)
    yield f"name: {name}", " ".join(["exception" if is_error else "class", *bases])
    if "__init__" in vars(value) and not is_dataclass(value):
        yield from _parameters(name, value)
    if is_dataclass(value):
        for field in fields(value):
            if field.init and not field.name.startswith("_"):
                kind = "keyword" if field.kw_only else "positional"
                yield f"parameter: {name}({field.name})", _default(field.default, kind, field)
    for inner, member in sorted(vars(value).items()):
        if inner.startswith("_") or (is_dataclass(value) and inner in value.__dataclass_fields__):
            continue
        function = inspect.unwrap(getattr(member, "__func__", member))
        if inspect.isfunction(function):
            yield f"name: {name}.{inner}", "method"
            yield from _parameters(f"{name}.{inner}", function)
        else:
            yield f"name: {name}.{inner}", "member" if isinstance(value, enum.EnumMeta) else "value"


def _parameters(name: str, function: Any) -> Iterator[Item]:
    for item in inspect.signature(function).parameters.values():
        if item.name in ("self", "cls") or item.name.startswith("_"):
            continue
        kind = "positional" if item.kind in _POSITIONAL else "keyword"
        if item.kind in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            yield f"parameter: {name}({item.name})", "any number"
        else:
            missing = MISSING if item.default is inspect.Parameter.empty else item.default
            yield f"parameter: {name}({item.name})", _default(missing, kind)


def _default(default: object, kind: str, field: Any = None) -> str:
    if default is MISSING and field is not None and field.default_factory is not MISSING:
        if not inspect.isclass(field.default_factory):
            return f"{kind}, default computed"  # it may depend on the environment
        default = field.default_factory()
    if default is MISSING:
        return f"required, {kind}"
    # Fields of a dataclass are listed with it.
    has_fields = is_dataclass(default) or " at 0x" in repr(default)
    return f"{kind}, default {type(default).__name__ if has_fields else repr(default)}"


def _options() -> Iterator[Item]:
    """Commands, with their options and the choices of an option."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    yield "command: duoka", "shows the first steps"
    for name, command in commands.items():
        yield f"command: duoka {name}", ""
        context = command.make_context(name, [], resilient_parsing=True)
        for item in command.params:
            is_argument = not item.opts[0].startswith("-")
            kind = "flag" if getattr(item, "is_flag", False) else item.metavar
            many = ", repeatable" if getattr(item, "multiple", False) or item.nargs < 0 else ""
            for word in [item.metavar] if is_argument else item.opts:
                yield f"option: duoka {name} {word}", f"{kind}{many}"
                if not is_argument:
                    for choice in item.shell_complete(context, ""):
                        yield f"choice: duoka {name} {word} {choice.value}", ""


def _exit_codes() -> Iterator[Item]:
    for code, _ in reference._exit_codes():
        for number in code.split(", "):
            yield f"exit code: {number}", ""
    for name, value in sorted(vars(duoka.errors).items()):
        if inspect.isclass(value) and issubclass(value, duoka.errors.DuokaError):
            yield f"exit code of: {name}", str(value.exit_code)


def _environment() -> Iterator[Item]:
    for name in reference.VARIABLES:
        yield f"environment: {name}", ""


def _json() -> Iterator[Item]:
    """Schemas of files, and the forms of what --json prints."""
    for file in (PLAN_FILE, REPORT_FILE):
        yield from _schema(file.name, json.loads(file.read_text(encoding="utf-8")))
    of_a_plan = json.loads(PLAN_FILE.read_text(encoding="utf-8"))["$defs"].keys() | {"Plan"}
    for command, cls in _PRINTED.items():
        schema = json_schema(cls, title=cls.__name__)
        for name in schema["$defs"].keys() & of_a_plan:
            del schema["$defs"][name]
        yield from _schema(f"duoka {command} --json", schema)
    for command, code in {
        "generate": generate._print_answers,
        "gpus": PresentGpu.to_dict,
        "gpus with links": import_module("duoka.cli.gpus"),
    }.items():
        for node in ast.walk(ast.parse(dedent(inspect.getsource(code)))):
            for key in node.keys if isinstance(node, ast.Dict) else ():
                if isinstance(key, ast.Constant):
                    yield f"json: duoka {command} --json {key.value}", ""


def _schema(name: str, schema: dict[str, Any]) -> Iterator[Item]:
    definitions = schema.get("$defs", {})
    for place, part in {"": schema, **{f" {key}": it for key, it in definitions.items()}}.items():
        for field, form in part.get("properties", {}).items():
            is_required = field in part.get("required", ())
            text = json.dumps(form, sort_keys=True, separators=(",", ":"))
            yield f"json: {name}{place} .{field}", text + (" required" if is_required else "")


def _metrics() -> Iterator[Item]:
    pool = cast(EnginePool, ScriptedPool(()))
    for collector in Metrics(pool, "model").registry._collector_to_names:
        families = [collector] if hasattr(collector, "_labelnames") else [*collector.collect()]
        for family in families:
            name = getattr(family, "name", None) or family._name
            kind = getattr(family, "type", None) or family._type
            yield f"metric: {name}", f"{kind} by {', '.join(family._labelnames)}"


def _routes() -> Iterator[Item]:
    """Routes of the server, and the fields of their requests."""
    pool = cast(EnginePool, ScriptedPool(()))
    for route in make_app(Service(pool, "model")).routes:
        for method in sorted((getattr(route, "methods", None) or {"any"}) - {"HEAD"}):
            yield f"route: {method} {route.path}", ""
        endpoint = getattr(route, "endpoint", None)
        for hint in typing.get_type_hints(endpoint).values() if endpoint else ():
            if inspect.isclass(hint) and issubclass(hint, BaseModel):
                for name, field in sorted(hint.model_fields.items()):
                    needed = "required" if field.is_required() else ""
                    yield f"request field: {route.path} {field.alias or name}", needed


def _package() -> Iterator[Item]:
    """Programs, plugins and extras of the package, and the fixtures of its pytest plugin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name, place in project["scripts"].items():
        yield f"program: {name}", place
    for name, place in project["entry-points"]["pytest11"].items():
        yield f"pytest plugin: {name}", place
    for name in project["optional-dependencies"].keys() - {"dev"}:
        yield f"extra: {name}", ""
    for name, value in sorted(vars(pytest_plugin).items()):
        if type(value).__name__ == "FixtureFunctionDefinition":
            yield f"fixture: {name}", ""


def _runs() -> Iterator[Item]:
    """The form of a run's directory."""
    yield "run: format", f"{run._FORMAT} {run._VERSION}"
    for path in vars(run.RunDirectory(Path())).values():
        if isinstance(path, Path) and path.name and not path.name.startswith("."):
            yield f"run: {path.name}", ""


def main() -> None:
    """Show what differs from the last release, or write the list."""
    parser = argparse.ArgumentParser(prog="python tests/public_list.py", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the list of this version")
    parser.add_argument("--version", default=duoka.__version__, help="by default duoka's own")
    given = parser.parse_args()
    now = public_list()
    if any(LISTS.glob("*.json")):
        version, before = released()
        added = [f"added: {key}" for key in now if key not in before]
        lines = [*breaks(before, now), *added] or ["nothing"]
        sys.stdout.write(f"since {version}:\n" + "".join(f"  {line}\n" for line in lines))
    if given.write:
        file = LISTS / f"{given.version}.json"
        file.write_text(json.dumps(now, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
        sys.stdout.write(f"{len(now)} items: {file.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()

"""CONTRIBUTING's map is the truth, and so are the faces of the packages."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "duoka"
PACKAGES = sorted(path.parent for path in SOURCE.rglob("__init__.py") if path.parent != SOURCE)
FACE_LINES = 50


def mapped_layers() -> list[list[str]]:
    """The districts of each line of the map; the torch line has none."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = text.split("## The map")[1].split("```")[1].strip("\n").splitlines()
    return [re.findall(r"(?:^ |│ )(\w+)", line) for line in drawn]


def test_the_map_has_the_layers_of_the_import_contract() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    layers = [[name.strip() for name in layer.split("|")] for layer in contracts[0]["layers"]]
    assert [line for line in mapped_layers() if line] == layers


def test_the_torch_line_is_where_the_contract_has_it() -> None:
    layers = mapped_layers()
    below = [f"duoka.{name}" for line in layers[layers.index([]) + 1 :] for name in line]
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    assert sorted(below) == contracts[1]["source_modules"]


def test_a_face_names_every_module() -> None:
    faults = []
    for package in PACKAGES:
        docstring = ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))) or ""
        modules = {path.stem for path in package.glob("*.py")} - {"__init__"}
        modules |= {path.parent.name for path in package.glob("*/__init__.py")}
        missing = sorted(modules - set(re.findall(r"`(\w+)`", docstring)))
        if missing or len(docstring.splitlines()) > FACE_LINES:
            faults.append(f"{package.relative_to(SOURCE)}: misses {missing}, or is too long")
    assert not faults, "\n".join(faults)

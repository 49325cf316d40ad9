"""Planning never reaches torch, whatever is called; `make check` holds the contracts of imports."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "duoka"
FIRST_DISTRICT_WITH_TORCH = "virtual"
HEAVY = ("accelerate", "peft", "torch", "transformers")


def contracts() -> list[dict[str, Any]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: list[dict[str, Any]] = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return found


def existing_districts() -> set[str]:
    return {
        path.stem
        for path in SOURCE.iterdir()
        if path.suffix == ".py" or any(path.glob("*.py"))
        if not path.stem.startswith("__")
    }


def districts_above_the_torch_line() -> list[str]:
    layers = contracts()[0]["layers"]
    below = layers[layers.index(FIRST_DISTRICT_WITH_TORCH) + 1 :]
    above = [name.strip() for layer in below for name in layer.split("|")]
    return sorted(set(above) & existing_districts())


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_contract_names_every_district_above_the_torch_line() -> None:
    forbidden = contracts()[1]
    expected = [f"duoka.{district}" for district in districts_above_the_torch_line()]
    assert sorted(forbidden["source_modules"]) == expected
    assert forbidden["forbidden_modules"] == list(HEAVY)


def modules_of(district: str) -> list[str]:
    folder = SOURCE / district
    paths = sorted(folder.rglob("*.py")) or [SOURCE / f"{district}.py"]
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in paths]
    return [f"duoka.{name}".removesuffix(".__init__") for name in names]


def test_importing_what_is_above_the_line_imports_nothing_heavy() -> None:
    districts = districts_above_the_torch_line()
    modules = [name for district in districts for name in modules_of(district)]
    done = run_python(
        f"import sys, {', '.join(modules)}\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert done.stderr == ""
    assert done.stdout == "[]\n"


@pytest.mark.slow
def test_public_names_are_imported_without_a_word() -> None:
    done = run_python("import duoka.testing; [getattr(duoka, name) for name in duoka.__all__]")
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["plan", "--help"], ["top", "--once"]]
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = run_python(
        "import sys\n"
        "from duoka.cli.main import run\n"
        f"run({arguments!r})\n"
        f"print([n for n in {HEAVY} if n in sys.modules])\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n")


def test_benchmarks_import_names_that_exist() -> None:
    imports = [
        (path.name, node.module or "", name.name)
        for path in (ROOT / "benchmarks").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("duoka")
        for name in node.names
    ]
    assert len(imports) > 100
    assert [use for use in imports if not exists(*use[1:])] == []


def exists(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name) or bool(
            importlib.import_module(f"{module}.{name}")
        )
    except ModuleNotFoundError:
        return False

"""The rooms import in one direction, and planning never reaches torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "duoka"
FIRST_ROOM_WITH_TORCH = "virtual"
HEAVY = ("accelerate", "peft", "torch", "transformers")


def contracts() -> list[dict[str, Any]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        found: list[dict[str, Any]] = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    return found


def existing_rooms() -> set[str]:
    return {
        path.stem
        for path in SOURCE.iterdir()
        if path.suffix == ".py" or any(path.glob("*.py"))
        if not path.stem.startswith("__")
    }


def rooms_above_the_torch_line() -> list[str]:
    layers = [layer.strip("()") for layer in contracts()[0]["layers"]]
    above = layers[layers.index(FIRST_ROOM_WITH_TORCH) + 1 :]
    return sorted(set(above) & existing_rooms())


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_contracts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True) == 0


def test_the_contract_names_every_room_above_the_torch_line() -> None:
    forbidden = contracts()[1]
    expected = [f"duoka.{room}" for room in rooms_above_the_torch_line()]
    assert sorted(forbidden["source_modules"]) == expected
    assert forbidden["forbidden_modules"] == list(HEAVY)


@pytest.mark.parametrize("room", ["", *rooms_above_the_torch_line()])
def test_importing_a_room_above_the_line_imports_nothing_heavy(room: str) -> None:
    module = f"duoka.{room}" if room else "duoka"
    done = run_python(
        f"import sys, {module}; print([name for name in {HEAVY} if name in sys.modules])"
    )
    assert done.stderr == ""
    assert done.stdout == "[]\n"


@pytest.mark.skipif(importlib.util.find_spec("duoka.cli") is None, reason="no cli yet")
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = run_python(
        "import sys, atexit\n"
        f"atexit.register(lambda: print([n for n in {HEAVY} if n in sys.modules]))\n"
        f"sys.argv = ['duoka', *{arguments!r}]\n"
        "from duoka.cli import main\n"
        "main()\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n")

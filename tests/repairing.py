"""Models from text, checked on two devices and repaired, for the tests of repairs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

from torch import nn

from duoka.checker import Subject, check_subject, read_entries
from duoka.repairs import Repairs, repair
from duoka.report import Report

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn
"""
_numbers = count()


def write(folder: Path, text: str, name: str = "model.py") -> Path:
    """A file with a model's source; the usual imports come first."""
    path = folder / name
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(HEAD + dedent(text))
    return path


def load(path: Path) -> ModuleType:
    """The module of a file, under a name of its own."""
    name = f"repaired_{next(_numbers)}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def check(
    model: nn.Module, device_map: Mapping[str, int | str], inputs: Any, *, train: bool = False
) -> Report:
    return check_subject(
        Subject(
            model=model,
            name=type(model).__name__,
            entries=read_entries(device_map),
            inputs=inputs,
            train=train,
        )
    )


def changed(repairs: Repairs) -> list[str]:
    """The lines that the patches add, without their indentation."""
    return [
        line[1:].strip()
        for patch in repairs
        for line in patch.diff.splitlines()
        if line.startswith("+") and not line.startswith("+++")
    ]


def repaired(model: nn.Module, device_map: Mapping[str, int | str], inputs: Any, **how: Any) -> Any:
    """The report of a model, and its repairs."""
    report = check(model, device_map, inputs, **how)
    return report, repair(report)

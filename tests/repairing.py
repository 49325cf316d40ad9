"""Models from text, checked on two devices and repaired, for the tests of repairs."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from textwrap import dedent, indent
from types import ModuleType
from typing import Any

import torch
from torch import nn

from duoka.checker.fix import Repairs, repair
from duoka.checker.run import check_subject
from duoka.checker.subject import Subject, read_entries
from duoka.report.check_report import CheckReport

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
) -> CheckReport:
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


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model with two layers, and the lines that its repair must add.

    `body` is the text of `forward`, whose argument is x; `init` of the end of `__init__`, `methods`
    of more methods, and `top` of what stands before the class.
    """

    name: str
    body: str
    lines: list[str]
    init: str
    methods: str
    top: str
    device_map: Mapping[str, int | str]
    train: bool

    @property
    def text(self) -> str:
        return (
            f"{dedent(self.top)}\n\nclass Model(nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n        self.a = nn.Linear(4, 4)\n"
            f"        self.b = nn.Linear(4, 4)\n{indent(dedent(self.init), ' ' * 8)}\n"
            f"    def forward(self, x):\n{indent(dedent(self.body), ' ' * 8)}\n"
            f"{indent(dedent(self.methods), ' ' * 4)}"
        )


def read_shapes(*tables: str) -> list[Shape]:
    """The shapes of some tables, in blocks: a name, then what `forward` does; + is a line to add.

    Other texts come before, each below its name, and `forward:` then ends them.
    """
    shapes = []
    for block in "\n\n".join(map(str.strip, tables)).split("\n\n"):
        title, *rest = block.splitlines()
        texts: dict[str, list[str]] = {"forward": [], "init": [], "methods": [], "top": []}
        device_map, lines, part = {"a": 0, "b": 1}, [], "forward"
        for line in dedent("\n".join(rest)).splitlines():
            if line.startswith("+ "):
                lines.append(line[2:])
            elif line.startswith("map: "):
                device_map = ast.literal_eval(line[5:])
            elif line.removesuffix(":") in texts:
                part = line.removesuffix(":")
            else:
                texts[part].append(line)
        body, init, methods, top = ("\n".join(text) for text in texts.values())
        name, _, option = title.strip().partition(" ")
        shapes.append(
            Shape(
                name=name, body=body, lines=lines, init=init, methods=methods, top=top,
                device_map=device_map, train=option == "(train)",
            )
        )  # fmt: skip
    return shapes


def repair_shape(shape: Shape, folder: Path) -> Repairs:
    """Check a shape's model, and repair it."""
    model = build(load(write(folder, shape.text)).Model)
    x = torch.linspace(-1, 1, 12).view(3, 4)
    return repaired(model, shape.device_map, {"x": x}, train=shape.train)[1]


def build(make: Callable[[], nn.Module]) -> nn.Module:
    """A model with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()

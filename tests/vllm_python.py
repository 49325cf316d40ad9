"""A Python that has the stand-in for vLLM, laid out in a directory."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

STAND_IN = Path(__file__).with_name("fake_vllm.py")


def write_python(directory: Path, *, version: str = "0.33.0", **behaviour: Any) -> Path:
    """Write a program that runs Python with a package `vllm`; it behaves as it is said."""
    packages = directory / "packages"
    module = packages / "vllm" / "entrypoints" / "cli"
    module.mkdir(parents=True)
    for folder in (packages / "vllm", module.parent, module):
        (folder / "__init__.py").touch()
    (packages / "vllm" / "__init__.py").write_text("print('INFO vllm is imported')\n")
    shutil.copy(STAND_IN, module / "main.py")
    metadata = packages / f"vllm-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Name: vllm\nVersion: {version}\n")
    return write_program(
        directory / "python",
        f"export PYTHONPATH={shlex.quote(str(packages))}\n"
        f"export STANDIN={shlex.quote(json.dumps(behaviour))}\n"
        f'exec {shlex.quote(sys.executable)} "$@"\n',
    )


def write_program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path

"""Compiles `duoka.forecast._memory` for a wheel; without a C compiler the wheel is pure Python.

One binary serves every CPython from 3.11 on (the limited API), so a wheel with it is cp311-abi3.
In an editable install it lies beside its source.

DUOKA_COMPILE=0 builds the pure wheel (py3-none-any) where a compiler exists; DUOKA_COMPILE=1 makes
a missing compiler or header an error. A release is built with one or the other.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension


class CustomBuildHook(BuildHookInterface):
    """Found by hatchling under this name."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before a wheel is put together; `version` is "standard" or "editable"."""
        source = Path(self.root) / "src" / "duoka" / "forecast"
        self._folder = tempfile.TemporaryDirectory()
        compiled = self._compile_as_chosen(source / "_memory.c")
        if version == "editable":
            for old in source.glob("_memory*.so"):
                old.unlink()  # not written over: some process may be using it
            if compiled is not None:
                shutil.copy(compiled, source)
        elif compiled is not None:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["tag"] = f"cp311-abi3-{platform}"
            build_data["pure_python"] = False
            build_data["force_include"][str(compiled)] = f"duoka/forecast/{compiled.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """After it."""
        self._folder.cleanup()

    def _compile_as_chosen(self, source: Path) -> Path | None:
        """Compile the module as DUOKA_COMPILE says; return None for a pure wheel."""
        choice = os.environ.get("DUOKA_COMPILE", "")
        if choice not in ("", "0", "1"):
            raise ValueError(f"DUOKA_COMPILE is {choice!r}; expected is 0, 1 or no value")
        if choice == "0":
            return None
        compiled = _compile(source, Path(self._folder.name))
        if compiled is None:
            message = "_memory.c isn't compiled (no compiler? no Python.h?): plans take longer"
            if choice == "1":
                raise RuntimeError(message)
            self.app.display_warning(message)
        return compiled


def _compile(source: Path, folder: Path) -> Path | None:
    """The compiled module in a folder; None where it can't be had."""
    extension = Extension(
        "duoka.forecast._memory",
        [str(source)],
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        py_limited_api=True,
        optional=True,
    )
    command = Distribution({"ext_modules": [extension]}).get_command_obj("build_ext")
    command.build_lib = command.build_temp = str(folder)
    command.ensure_finalized()
    command.run()
    return next(folder.glob("duoka/forecast/_memory*.*"), None)

"""Model code that comes with a checkpoint, imported from where it lies.

Transformers runs a copy of such code, in a folder of its own. Whoever looks for faults in the code
wants to read of the file that he has: here modules have the names of his files, and run what was
read of them once. Nothing is written, no cache of bytecode either.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


def import_class(reference: str, directory: Path, files: Mapping[str, bytes]) -> Any:
    """Import a class from a checkpoint's own code.

    The modules stay importable for the life of the process, as others do: code may import them
    when it runs.
    """
    finder = _Finder(directory, files)
    if not any(isinstance(known, _Finder) and known.name == finder.name for known in sys.meta_path):
        sys.meta_path.append(finder)
    module, _, name = reference.partition(".")
    return getattr(importlib.import_module(f"{finder.name}.{module}"), name)


class _Finder(MetaPathFinder):
    """Finds the modules of one checkpoint; other content makes another package."""

    def __init__(self, directory: Path, files: Mapping[str, bytes]) -> None:
        self._directory = directory.absolute()
        self._files = files
        content = repr((str(self._directory), sorted(files.items()))).encode()
        self.name = f"checkpoint_{hashlib.sha256(content).hexdigest()[:16]}"

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Answer for the package and its modules."""
        if fullname == self.name:
            return ModuleSpec(fullname, None, is_package=True)
        package, _, module = fullname.partition(".")
        file = f"{module.replace('.', '/')}.py"
        if package != self.name or file not in self._files:
            return None
        loader = _Loader(self._directory / file, self._files[file])
        return ModuleSpec(fullname, loader, origin=str(self._directory / file))


class _Loader(SourceLoader):
    def __init__(self, path: Path, content: bytes) -> None:
        self._path = path
        self._content = content

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        if path != str(self._path):
            raise OSError("no bytecode is kept")
        return self._content

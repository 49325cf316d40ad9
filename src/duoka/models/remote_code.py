"""Model code that comes with a checkpoint, imported from where it lies.

Transformers runs a copy of such code, in a folder of its own. Whoever looks for faults in the code
wants to read of the file that he has: here modules have the names of his files, and run what was
read of them once. Nothing is written, no cache of bytecode either.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from duoka.checkpoint.tokenizer_files import missing_package
from duoka.errors import ModelError

from . import transformers4

# "file.Class"; transformers would fetch "org/name--file.Class" from another repository and run it.
_REFERENCE = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*", re.ASCII)
OTHER_VERSIONS = "the code was written for other versions of its libraries: look at that call"


class RemoteCode:
    """The files of a checkpoint's code, and for which transformers they were written.

    The modules stay importable for the life of the process, as others do: code may import them
    when it runs.
    """

    def __init__(self, directory: Path, files: Mapping[str, bytes], *, legacy: bool) -> None:
        self.legacy = legacy
        self._finder = _Finder(directory, files, legacy=legacy)

    def import_class(self, reference: str) -> Any:
        """Import a class by what ``auto_map`` calls it: "file.Class"."""
        if not _REFERENCE.fullmatch(reference):
            raise ModelError(
                f"the checkpoint's auto_map asks for {reference[:200]!a}, which is no code of its "
                "own; code from elsewhere is not run",
                hint="use the repository that holds the code, or put its files into this one",
            )
        known = (finder.name for finder in sys.meta_path if isinstance(finder, _Finder))
        if self._finder.name not in known:
            sys.meta_path.append(self._finder)
        module, _, name = reference.partition(".")
        try:
            return getattr(importlib.import_module(f"{self._finder.name}.{module}"), name)
        except Exception as error:
            raise ModelError(
                f"the checkpoint's own code could not be loaded: {error}", hint=_hint(error)
            ) from error


def _hint(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return missing_package(error.name.partition(".")[0])
    return OTHER_VERSIONS


class _Finder(MetaPathFinder):
    """Finds the modules of one checkpoint; other content makes another package."""

    def __init__(self, directory: Path, files: Mapping[str, bytes], *, legacy: bool) -> None:
        self._directory = directory.absolute()
        self._files = files
        self._legacy = legacy
        content = repr((str(self._directory), sorted(files.items()), legacy)).encode()
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
        kind = _LegacyLoader if self._legacy else _Loader
        loader = kind(self._directory / file, self._files[file])
        spec = ModuleSpec(fullname, loader, origin=str(self._directory / file))
        spec.has_location = True  # the modules have a __file__
        return spec


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


class _LegacyLoader(_Loader):
    def exec_module(self, module: ModuleType) -> None:
        transformers4.execute(partial(super().exec_module, module), vars(module))

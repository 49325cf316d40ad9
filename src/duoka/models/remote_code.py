"""Import the model code of a checkpoint (remote code) from its own files.

transformers runs a copy of such code in its cache directory. Here modules have the paths of the
checkpoint's own files, so that reports of faults name the user's files. They run the content that
was read once. Nothing is written, not even a bytecode cache.
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

from duoka.checkpoint.tokenizer_files import missing_module
from duoka.errors import ModelError

from . import transformers4
from .cache_argument import takes_cache

# "file.Class". transformers would also download and run code of another repository, written as
# "org/name--file.Class".
_REFERENCE = re.compile(r"[A-Za-z_]\w*\.[A-Za-z_]\w*", re.ASCII)
_CALLED = {"forward", "prepare_inputs_for_generation"}
OTHER_VERSIONS = "the code was written for other library versions; see that call"

_FLASH_ATTENTION = re.compile("flash[-_ ]?att", re.IGNORECASE)


def stop_hint(message: str, hint: str = OTHER_VERSIONS) -> str:
    """Return the hint for an error of remote code; a special one for a missing flash_attn."""
    if _FLASH_ATTENTION.search(message):
        return f'{missing_module("flash_attn")}, or "_attn_implementation": "eager" in config.json'
    return hint


class RemoteCode(MetaPathFinder):
    """The code files of a checkpoint, importable as a package named by a content hash.

    `legacy` means that the code was written for transformers 4. The modules stay importable for the
    life of the process, because code may import them later when it runs.
    """

    def __init__(self, directory: Path, files: Mapping[str, bytes], *, legacy: bool) -> None:
        self.legacy = legacy
        self._directory = directory.absolute()
        self._files = files
        content = repr((str(self._directory), sorted(files.items()), legacy)).encode()
        self._package = f"checkpoint_{hashlib.sha256(content).hexdigest()[:16]}"

    def import_class(self, reference: str) -> Any:
        """Import a class by its name in ``auto_map``: "file.Class"."""
        if not _REFERENCE.fullmatch(reference):
            raise ModelError(
                f"the checkpoint's auto_map refers to {reference[:200]!a}, which is code of "
                "another repository; such code is not run",
                hint="use the repository that contains the code, or add its files to this one",
            )
        packages = (finder._package for finder in sys.meta_path if isinstance(finder, RemoteCode))
        if self._package not in packages:
            sys.meta_path.append(self)
        module, _, name = reference.partition(".")
        try:
            return getattr(importlib.import_module(f"{self._package}.{module}"), name)
        except Exception as error:
            hint = stop_hint(str(error))
            if isinstance(error, ModuleNotFoundError) and error.name is not None:
                module = error.name.removeprefix(f"{self._package}.")
                hint = f"{module}.py is missing beside the code: download it"
                if module == error.name:
                    hint = missing_module(module, self._files)
            raise ModelError(
                f"the checkpoint's own code could not be loaded: {error}", hint=hint
            ) from error

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the package or of a module in the package; None for other names."""
        if fullname == self._package:
            return ModuleSpec(fullname, None, is_package=True)
        package, _, module = fullname.partition(".")
        file = f"{module.replace('.', '/')}.py"
        if package != self._package or file not in self._files:
            return None
        place = self._directory / file
        loader = _Loader(place, self._files[file], legacy=self.legacy)
        spec = ModuleSpec(fullname, loader, origin=str(place))
        spec.has_location = True  # the modules have a __file__
        return spec


class _Loader(SourceLoader):
    """Runs a module from its content, adapted to transformers 4 or 5."""

    def __init__(self, path: Path, content: bytes, *, legacy: bool) -> None:
        self._path = path
        self._content = content
        self._legacy = legacy

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        if path != str(self._path):
            raise OSError("no bytecode is kept")
        return self._content

    def exec_module(self, module: ModuleType) -> None:
        run = partial(super().exec_module, module)
        transformers4.execute(run, vars(module)) if self._legacy else run()
        for part in list(vars(module).values()):
            if isinstance(part, type) and part.__module__ == module.__name__:
                for name in _CALLED & vars(part).keys():
                    setattr(part, name, takes_cache(vars(part)[name], strict=False))

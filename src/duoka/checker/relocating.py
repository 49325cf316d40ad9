"""Model code that was loaded from a copy, told by the files that it was copied from."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FunctionType

from ..checkpoint import Checkpoint

_PACKAGE = "transformers_modules."


def relocate(checkpoint: Checkpoint) -> None:
    """Let the code that came with a directory name the directory's files, where they are equal.

    transformers loads such code from a copy in its own cache. Nobody looks for a fault there, and
    a repair of the copy would be lost.
    """
    originals = {file.content: Path(checkpoint.source) / file.name for file in checkpoint.code}
    copies = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.startswith(_PACKAGE) and file is not None and Path(file).is_file():
            content = Path(file).read_bytes()
            original = originals.get(content)
            if original is not None and original.is_file() and original.read_bytes() == content:
                copies[file] = str(original.resolve())
    _rename(copies)


def _rename(files: Mapping[str, str]) -> None:
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_filename in files:
            each.__code__ = _named(each.__code__, files[each.__code__.co_filename])


def _named(code: CodeType, file: str) -> CodeType:
    inner = (_named(each, file) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=file, co_consts=tuple(inner))

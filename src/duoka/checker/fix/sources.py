"""Source files of a fix, read once each."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from duoka.base.files import read_bytes, why
from duoka.base.model_code import torch_folder
from duoka.report.check_report import Fault

from .syntax import Tree

_MOST_BYTES = 8 << 20
_NOTEBOOK_CELL = "<ipython-input"


class SourceError(Exception):
    """Error for source that cannot be read, parsed or changed, with the reason."""


class Sources:
    """Texts and syntax trees of files; `texts` overrides the content of files on disk."""

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        self.texts = dict(texts or {})
        self._trees: dict[str, Tree] = {}

    def text(self, file: str) -> str:
        """Return the text of a file or notebook cell, line ends unchanged; raise SourceError."""
        if file.startswith(torch_folder()):
            raise SourceError("the fault is in PyTorch's own code: keep that module on one device")
        if file.startswith("<") and not file.startswith(_NOTEBOOK_CELL):
            raise SourceError("the fault is in generated code without a source file")
        if file not in self.texts:
            try:
                self.texts[file] = read_source(Path(file))
            except SourceError:
                # A notebook's cell is no file, but its lines are in Python's line cache.
                lines = linecache.getlines(file)
                if not lines:
                    raise
                self.texts[file] = "".join(lines)
        return self.texts[file]

    def tree(self, file: str) -> Tree:
        """Return the syntax tree of a file."""
        if file not in self._trees:
            self._trees[file] = Tree(file, self.text(file))
        return self._trees[file]


@dataclass(frozen=True, slots=True)
class Site:
    """A fault, and the tree of its file."""

    fault: Fault
    tree: Tree


def read_source(path: Path) -> str:
    """Read the text of a file, line ends unchanged; raise SourceError."""
    try:
        return read_bytes(path, most_bytes=_MOST_BYTES).decode("utf-8")
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} can't be read: {why(error)}") from error

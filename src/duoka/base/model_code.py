"""Model code: code outside of PyTorch, duoka and the standard library, and errors raised there.

PyTorch is located without importing it.
"""

from __future__ import annotations

import linecache
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, TracebackType
from typing import NamedTuple

_OWN = str(Path(__file__).parent.parent) + "/"
_STANDARD = sysconfig.get_paths()["stdlib"] + "/"
_INSTALLED = ("/site-packages/", "/dist-packages/")


class Spot(NamedTuple):
    """A code object, the offset of an instruction in it, and its file.

    Equal functions of two files have equal code objects: the file tells them apart.
    """

    code: CodeType
    offset: int
    file: str


@cache
def torch_folder() -> str:
    """Return the directory of PyTorch's files."""
    spec = find_spec("torch")
    assert spec is not None, "duoka needs it"
    return str(Path(spec.origin or "").parent) + "/"


def is_installed(file: str | None) -> bool:
    """Return True for a file of duoka, of the standard library or of an installed package."""
    if file is None:
        return True
    return file.startswith((_OWN, _STANDARD)) or any(part in file for part in _INSTALLED)


def is_model_code(code: CodeType) -> bool:
    """Return True for code outside of PyTorch, duoka and the standard library."""
    return _is_model_file(code.co_filename)


@cache
def _is_model_file(file: str) -> bool:
    if file.startswith((_OWN, torch_folder(), "<frozen")):
        return False
    return not file.startswith(_STANDARD) or any(part in file for part in _INSTALLED)


def is_own_code(code: CodeType) -> bool:
    """Return True for duoka's code."""
    return code.co_filename.startswith(_OWN)


def raised_in(
    error: BaseException, is_wanted: Callable[[CodeType], bool] = is_model_code
) -> Spot | None:
    """Return the innermost model code in an error's traceback, and its instruction; None if none.

    `is_wanted` selects other code than model code.
    """
    trace = _innermost(error, is_wanted)
    if trace is None:
        return None
    code = trace.tb_frame.f_code
    return Spot(code, trace.tb_lasti, code.co_filename)


def where_raised(error: BaseException) -> str:
    """Describe the file, line and source text where model code raised an error; "" if none did."""
    trace = _innermost(error, is_model_code)
    if trace is None:
        return ""
    file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
    text = linecache.getline(file, line).strip()
    return f" at {file}:{line}" + (f" ({text})" if text else "")


def _innermost(error: BaseException, is_wanted: Callable[[CodeType], bool]) -> TracebackType | None:
    """Return the innermost frame of an error's traceback with wanted code; None if none."""
    innermost, trace = None, error.__traceback__
    while trace is not None:
        if is_wanted(trace.tb_frame.f_code):
            innermost = trace
        trace = trace.tb_next
    return innermost

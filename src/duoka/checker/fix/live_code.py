"""Run patched code in live functions temporarily.

A live model is proved in place: its methods, hooks, closures and partials stay the same objects;
only their code objects are exchanged, by qualified name, including nested functions and lambdas.
Afterwards the original code is restored. (A separate process would need a copy of the model, which
can differ.)
"""

from __future__ import annotations

import gc
import linecache
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType

from duoka.report.check_report import Place

from ..source_map import parse_quietly

COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})

LiveFunctions = Mapping[str, Sequence[FunctionType]]
"""Function objects of this process by the file of their code."""


class SwapError(Exception):
    """Error with the reason why live functions cannot run the changed code."""


class ClosureError(SwapError):
    """Error for changed code with other free variables than the live closure has."""

    def __init__(self, old: CodeType, new: CodeType) -> None:
        old_names, new_names = (", ".join(code.co_freevars) or "nothing" for code in (old, new))
        super().__init__(
            f"{old.co_qualname} is a live closure over {old_names}; the patched one is over "
            f"{new_names}"
        )
        self.place = Place(file=old.co_filename, line=old.co_firstlineno, function=old.co_qualname)


def live_functions() -> LiveFunctions:
    """Return all functions of this process except comprehensions.

    This takes a tenth of a second; call it once per model.
    """
    by_file: dict[str, list[FunctionType]] = defaultdict(list)
    num_frozen = gc.get_freeze_count()
    gc.unfreeze()  # `get_objects` leaves out objects that `gc.freeze` excluded from collection
    for value in gc.get_objects():
        if type(value) is FunctionType and value.__code__.co_name not in COMPREHENSIONS:
            by_file[value.__code__.co_filename].append(value)
    if num_frozen:
        gc.freeze()
    return by_file


@contextmanager
def swap_code(
    live: LiveFunctions, old_text: Mapping[str, str], new_text: Mapping[str, str]
) -> Iterator[None]:
    """Let the live functions of changed files run the code of the new texts inside the scope."""
    files = [file for file in new_text if new_text[file] != old_text[file]]
    exchanges: list[tuple[FunctionType, CodeType]] = []
    for file in files:
        exchanges += _exchanges(file, old_text[file], new_text[file], live.get(file, ()))
    old_codes = [(function, function.__code__) for function, _ in exchanges]
    old_lines = {file: linecache.cache.get(file) for file in files}
    try:
        for function, code in exchanges:
            function.__code__ = code
        for file in files:
            text = new_text[file]
            # Without a time of change, `linecache` doesn't look at the file again.
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        yield
    finally:
        for function, code in old_codes:
            function.__code__ = code
        for file, lines in old_lines.items():
            if lines is None:
                linecache.cache.pop(file, None)
            else:
                linecache.cache[file] = lines


def _exchanges(
    file: str, before: str, after: str, live: Sequence[FunctionType]
) -> Iterator[tuple[FunctionType, CodeType]]:
    """Yield the live functions of a file whose code changes, each with its new code.

    Raises SwapError if the new code of a live function can't be determined.
    """
    old, new = _codes(before, file), _codes(after, file)
    names = {code.co_qualname for code in old}
    # A new nested function needs no exchange: its code is part of the enclosing function's code.
    new = [code for code in new if code.co_qualname in names or "<locals>" not in code.co_qualname]
    if [code.co_qualname for code in old] != [code.co_qualname for code in new]:
        raise SwapError(f"the patched {file} defines other functions")
    new_codes = dict(zip(old, new, strict=True))
    outlines = {_outline(code): code for code in old}
    # Live functions are found by their code. Code objects compare by value, positions included, so
    # that each of two lambdas on one line finds its own. Codes that were compiled with other flags,
    # as in a notebook, differ, and are found by name, first line, bytecode and names.
    matches = [
        (function, code if (code := function.__code__) in new_codes else outlines[_outline(code)])
        for function in live
        if function.__code__ in new_codes or _outline(function.__code__) in outlines
    ]
    for function, code in matches:
        if code.co_freevars != new_codes[code].co_freevars:
            raise ClosureError(code, new_codes[code])
        if code != new_codes[code]:
            yield function, new_codes[code]
    unmatched = {function.__code__.co_qualname for function in live}
    unmatched -= {code.co_qualname for _, code in matches}
    for code, changed in new_codes.items():
        # An unmatched function may be a leftover of an earlier text: a problem only if patched.
        is_changed = (code.co_code, code.co_names) != (changed.co_code, changed.co_names)
        if is_changed and code.co_qualname in unmatched:
            raise SwapError(
                f"{code.co_qualname} differs from {file}: the file has changed since it was "
                "imported"
            )


def _outline(code: CodeType) -> tuple[object, ...]:
    """Return the properties of code that don't depend on compiler flags."""
    return code.co_qualname, code.co_firstlineno, code.co_code, code.co_names


def _codes(text: str, file: str) -> list[CodeType]:
    """Return the code of every function, lambda and class, in text order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python gave them when the text was imported
        module = compile(parse_quietly(text), file, "exec", dont_inherit=True)
    return [code for code in _nested_codes(module) if code.co_name not in COMPREHENSIONS]


def _nested_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects inside a code object, at any depth."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested_codes(constant)

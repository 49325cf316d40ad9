"""Live functions that run other code for a while: the code of a file's changed text.

A live model is proved as it is: its methods, hooks, closures and partials stay the very objects,
and only what they run is exchanged, by qualified name. Functions and lambdas inside of others come
with the code of those. Afterwards everything is as before. (A process of its own would need the
model there, and no closure, hook or set of weights travels; a fresh import of the changed text
would leave closures and hooks that exist already on their old code.)
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

_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})

LiveFunctions = Mapping[str, Sequence[FunctionType]]
"""Functions by the file that their code is from."""
_CodePair = tuple[CodeType, CodeType]


class SwapError(Exception):
    """Live functions can't run the changed code; its text says why."""


class ClosureError(SwapError):
    """The changed code of one live function, at a place, is over other names than the function."""

    def __init__(self, old: CodeType, new: CodeType) -> None:
        old_names, new_names = (", ".join(code.co_freevars) or "nothing" for code in (old, new))
        super().__init__(
            f"{old.co_qualname} is a live closure over {old_names}; the patched one is over "
            f"{new_names}"
        )
        self.place = Place(file=old.co_filename, line=old.co_firstlineno, function=old.co_qualname)


def live_functions() -> LiveFunctions:
    """Every function of this process that isn't a comprehension.

    Looking for them takes a tenth of a second: once will do for all that is tried on one model.
    """
    by_file: dict[str, list[FunctionType]] = defaultdict(list)
    for value in gc.get_objects():
        if type(value) is FunctionType and value.__code__.co_name not in _COMPREHENSIONS:
            by_file[value.__code__.co_filename].append(value)
    return by_file


@contextmanager
def swapped(
    live: LiveFunctions, before: Mapping[str, str], after: Mapping[str, str]
) -> Iterator[None]:
    """Let every live function of some files run what a changed text says, inside the scope."""
    files = [file for file in after if after[file] != before[file]]
    exchanges: list[tuple[FunctionType, CodeType]] = []
    for file in files:
        exchanges += _exchanges(file, before[file], after[file], live.get(file, ()))
    old_codes = [(function, function.__code__) for function, _ in exchanges]
    old_lines = {file: linecache.cache.get(file) for file in files}
    try:
        for function, code in exchanges:
            function.__code__ = code
        for file in files:
            text = after[file]
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
    """Which live functions of a file run what, all together or not at all."""
    old, new = _codes(before, file), _codes(after, file)
    names = {code.co_qualname for code in old}
    # What is new inside of a function comes with the code of that function.
    new = [code for code in new if code.co_qualname in names or "<locals>" not in code.co_qualname]
    if [code.co_qualname for code in old] != [code.co_qualname for code in new]:
        raise SwapError(f"the functions of the patched {file} are others")
    pairs: dict[str, list[_CodePair]] = defaultdict(list)
    for pair in zip(old, new, strict=True):
        pairs[pair[0].co_qualname].append(pair)
    matched, strange = set(), set()
    for function in live:
        name = function.__code__.co_qualname
        match = _pair_of(function.__code__, pairs[name])
        if match is None:
            strange.add(name)
            continue
        matched.add(name)
        if match[0].co_freevars != match[1].co_freevars:
            raise ClosureError(*match)
        if match[0] != match[1]:
            yield function, match[1]
    # A function that nobody uses any more may be of an earlier text.
    for name in sorted(strange - matched):
        if not all(_is_same(*pair) for pair in pairs[name]):
            raise SwapError(f"{name} isn't what {file} says: the file has changed since its import")


def _pair_of(code: CodeType, pairs: Sequence[_CodePair]) -> _CodePair | None:
    """The old and the new code of a live function, by its place in the text."""
    alike = [
        pair
        for pair in pairs
        if pair[0].co_firstlineno == code.co_firstlineno and _is_same(code, pair[0])
    ]
    # Of lambdas on one line, the one that is equal in its constants and columns as well.
    exact = [pair for pair in alike if pair[0] == code]
    return next(iter(exact or alike), None)


def _is_same(one: CodeType, other: CodeType) -> bool:
    """Whether two codes do the same, wherever they stand."""
    return one.co_code == other.co_code and one.co_names == other.co_names


def _codes(text: str, file: str) -> list[CodeType]:
    """The code of every function, lambda and class, in the order of the text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the text, when it was imported
        module = compile(parse_quietly(text), file, "exec", dont_inherit=True)
    return [code for code in _inside(module) if code.co_name not in _COMPREHENSIONS]


def _inside(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _inside(constant)

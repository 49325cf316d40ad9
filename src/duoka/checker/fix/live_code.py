"""Live functions that run other code for a while: the code of a file's changed text.

A live model is proved as it is: its methods, hooks, closures and partials stay the very objects,
and only what they run is exchanged, by qualified name. Functions and lambdas inside of others come
with the code of those. Afterwards everything is as before.
"""

from __future__ import annotations

import gc
import linecache
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType

from .sources import parse_quietly

_COMPREHENSIONS = frozenset({"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"})
_REWRITTEN = "@pytest_ar"
"""A name in functions whose assertions pytest has rewritten: their code isn't the file's."""


class SwapError(Exception):
    """A live function can't run the changed code; its text says why.

    Parameters
    ----------
    message : str
    file, function : str
        Which one: where its code stands, and its qualified name; "" for none in particular.
    """

    def __init__(self, message: str, file: str, function: str = "") -> None:
        super().__init__(message)
        self.file = file
        self.function = function


Live = Mapping[str, Sequence[FunctionType]]
"""Functions by the file that their code is from."""


def live_functions() -> Live:
    """Every function of this process that isn't a comprehension.

    Looking for them takes a tenth of a second: once will do for all that is tried on one model.
    """
    found: dict[str, list[FunctionType]] = defaultdict(list)
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__.co_name not in _COMPREHENSIONS:
            found[each.__code__.co_filename].append(each)
    return found


@contextmanager
def swapped(live: Live, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[None]:
    """Let every live function of some files run what a changed text says, inside the scope."""
    files = [file for file in after if after[file] != before[file]]
    plan: list[tuple[FunctionType, CodeType]] = []
    for file in files:
        plan += _planned(file, before[file], after[file], live.get(file, ()))
    olds = [(function, function.__code__) for function, _ in plan]
    lines = {file: linecache.cache.get(file) for file in files}
    try:
        for function, code in plan:
            function.__code__ = code
        for file in files:
            text = after[file]
            # Without a time of change, `linecache` doesn't look at the file again.
            linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
        yield
    finally:
        for function, code in olds:
            function.__code__ = code
        for file, entry in lines.items():
            if entry is None:
                linecache.cache.pop(file, None)
            else:
                linecache.cache[file] = entry


def _planned(
    file: str, before: str, after: str, live: Sequence[FunctionType]
) -> Iterator[tuple[FunctionType, CodeType]]:
    """Which live functions of a file run what, all together or not at all."""
    old, new = _codes(before, file), _codes(after, file)
    names = {code.co_qualname for code in old}
    # What is new inside of a function comes with the code of that function.
    new = [each for each in new if each.co_qualname in names or "<locals>" not in each.co_qualname]
    if [code.co_qualname for code in old] != [code.co_qualname for code in new]:
        raise SwapError(f"the functions of the patched {file} are others", file)
    pairs: dict[str, list[tuple[CodeType, CodeType]]] = defaultdict(list)
    for was, now in zip(old, new, strict=True):
        pairs[was.co_qualname].append((was, now))
    met, strange = set(), set()
    for function in live:
        name = function.__code__.co_qualname
        pair = _pair_of(function.__code__, pairs[name])
        if pair is None:
            strange.add(name)
            continue
        met.add(name)
        _refuse_other_closure(*pair)
        if pair[0] != pair[1]:
            yield function, pair[1]
    changed = {was.co_qualname for was, now in zip(old, new, strict=True) if _differ(was, now)}
    for name in sorted(strange - met):
        # A function that nobody uses any more may be of an earlier text.
        if name in changed:
            raise SwapError(
                f"{name} isn't what {file} says: the file has changed since its import", file, name
            )


def _pair_of(
    code: CodeType, pairs: list[tuple[CodeType, CodeType]]
) -> tuple[CodeType, CodeType] | None:
    """The old and the new code of a live function, by its place in the text."""
    alike = [
        pair
        for pair in pairs
        if pair[0].co_firstlineno == code.co_firstlineno and _is_same(code, pair[0])
    ]
    # Of lambdas on one line, the one that is equal in its constants and columns as well.
    alike = [pair for pair in alike if pair[0] == code] or alike
    return alike[0] if alike else None


def _refuse_other_closure(was: CodeType, now: CodeType) -> None:
    if was.co_freevars != now.co_freevars:
        raise SwapError(
            f"{was.co_qualname} is a live closure over {_listed(was.co_freevars)}; "
            f"the patched one is over {_listed(now.co_freevars)}",
            was.co_filename,
            was.co_qualname,
        )


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"


def _differ(was: CodeType, now: CodeType) -> bool:
    """Whether two codes do something else, wherever they stand."""
    if (was.co_code, was.co_names, was.co_varnames, was.co_freevars) != (
        (now.co_code, now.co_names, now.co_varnames, now.co_freevars)
    ):
        return True
    pairs = list(zip(was.co_consts, now.co_consts, strict=False))
    return len(was.co_consts) != len(now.co_consts) or any(
        _differ(one, other)
        if isinstance(one, CodeType) and isinstance(other, CodeType)
        else one != other
        for one, other in pairs
    )


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


def _is_same(live: CodeType, compiled: CodeType) -> bool:
    """Whether a live function's code is what the text gives."""
    if _REWRITTEN in live.co_names:
        return live.co_freevars == compiled.co_freevars
    return live.co_code == compiled.co_code and live.co_names == compiled.co_names

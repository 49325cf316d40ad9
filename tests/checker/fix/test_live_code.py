"""Code that takes the place of other code for a while."""

from __future__ import annotations

import functools
import linecache
from pathlib import Path
from types import ModuleType

import pytest
from repairing import load

from duoka.checker.fix.live_code import SwapError, live_functions, swap_code

TEXT = '''\
import functools


def number():
    """The number."""
    return 1


class Box:
    scale = 2

    def value(self):
        return number() * self.scale

    @staticmethod
    def fixed():
        return 1

    @property
    def one(self):
        return 1

    @functools.lru_cache
    def kept(self):
        return 1


def outer(free):
    def inner():
        return [free + 1 for _ in range(1)]

    return inner


pair = [lambda: 1, lambda: 1 + 1]


def decorate(function):
    @functools.wraps(function)
    def around():
        return function() + 1

    return around


@decorate
def decorated():
    return 1


partial = functools.partial(number)
'''


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "boxes.py"
    path.write_text(TEXT)
    return path


@pytest.fixture
def module(path: Path) -> ModuleType:
    return load(path)


def change(path: Path, *pairs: tuple[str, str]) -> dict[str, str]:
    text = TEXT
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new)
    return {str(path): text}


def test_functions_methods_closures_partials_and_lambdas_run_other_code(
    path: Path, module: ModuleType
) -> None:
    box, closure, pair = module.Box(), module.outer(4), module.pair
    value = box.value  # a bound method from before
    after = change(
        path,
        ("return 1\n", "return 10\n"),
        ("free + 1", "free + 10"),
        ("lambda: 1 + 1", "lambda: 1 + 10"),
        ("scale = 2", "scale = 3"),
    )
    before = {str(path): TEXT}

    def values() -> list[int]:
        return [
            module.number(), value(), box.fixed(), box.one, *closure(), *module.outer(5)(),
            pair[0](), pair[1](), module.decorated(), module.partial(),
        ]  # fmt: skip

    old = values()
    with swap_code(live_functions(), before, after):
        # What a class body says is not run again.
        assert values() == [10, 20, 10, 10, 14, 15, 1, 11, 11, 10]
        assert "return 10" in "".join(linecache.getlines(str(path)))
    assert values() == old == [1, 2, 1, 1, 5, 6, 1, 2, 2, 1]
    linecache.checkcache()
    assert linecache.getlines(str(path)) == TEXT.splitlines(keepends=True)


def test_all_is_put_back_after_an_error(path: Path, module: ModuleType) -> None:
    after = change(path, ("return 1\n", "return 10\n"))

    def fail() -> None:
        with swap_code(live_functions(), {str(path): TEXT}, after):
            assert module.number() == 10
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert module.number() == 1


def test_lines_that_shift_are_the_new_ones(path: Path, module: ModuleType) -> None:
    after = {str(path): TEXT.replace("def number", "# more\n# lines\ndef number")}
    with swap_code(live_functions(), {str(path): TEXT}, after):
        assert module.Box.value.__code__.co_firstlineno == 14


def test_another_closure_is_refused(path: Path, module: ModuleType) -> None:
    text = TEXT.replace("def outer(free):", "def outer(free, more=1):")
    module_text = text.replace("free + 1", "free + more")
    path.write_text(text)
    live = load(path)
    closure = live.outer(4)
    with (
        pytest.raises(SwapError, match="closure over free; the patched one is over free, more"),
        swap_code(live_functions(), {str(path): text}, {str(path): module_text}),
    ):
        pass
    assert closure() == [5]


def test_a_file_that_changed_since_its_import_is_refused(path: Path, module: ModuleType) -> None:
    text = TEXT.replace("return number() * self.scale", "return self.scale")
    after = text.replace("return self.scale", "return -self.scale")
    with (
        pytest.raises(SwapError, match=r"Box.value differs from .*boxes.py"),
        swap_code(live_functions(), {str(path): text}, {str(path): after}),
    ):
        pass
    assert module.Box().value() == 2


def test_other_functions_are_refused(path: Path, module: ModuleType) -> None:
    after = {str(path): TEXT + "\ndef more():\n    pass\n"}
    with (
        pytest.raises(SwapError, match="defines other functions"),
        swap_code(live_functions(), {str(path): TEXT}, after),
    ):
        pass
    assert functools.reduce(lambda a, b: a + b, [module.number()]) == 1

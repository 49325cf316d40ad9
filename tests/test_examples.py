"""The examples in the docstrings of public names run, and print what they say."""

from __future__ import annotations

import doctest
import sys
from types import ModuleType

import pytest
import torch

import duoka
from duoka.testing import assert_device_safe

PUBLIC = {name: getattr(duoka, name) for name in duoka.__all__} | {
    "assert_device_safe": assert_device_safe
}


@pytest.mark.parametrize("name", PUBLIC)
def test_examples(name: str) -> None:
    public = PUBLIC[name]
    module = public if isinstance(public, ModuleType) else sys.modules[public.__module__]
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    printed: list[str] = []
    names = {**vars(module), "duoka": duoka, "torch": torch}
    for example in doctest.DocTestFinder().find(public, name, module, globs=names):
        runner.run(example, out=printed.append)
    assert not printed, "".join(printed)

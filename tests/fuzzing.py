"""How many random inputs a reader is fed: a few in every test run, ten thousand by `make fuzz`.

A test that is to run there has ``@fuzz()`` above its ``@given(…)``; or the marker ``fuzz`` and
``settings(max_examples=examples())``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from hypothesis import settings

Test = TypeVar("Test", bound=Callable[..., Any])


def examples(default: int = 200) -> int:
    """DUOKA_FUZZ_EXAMPLES if that is set, or else the number given here."""
    return int(os.environ.get("DUOKA_FUZZ_EXAMPLES") or default)


def fuzz(default: int = 200) -> Callable[[Test], Test]:
    """Mark a property as fuzzing, and give it as many examples as are wanted."""

    def decorate(test: Test) -> Test:
        marked: Test = pytest.mark.fuzz(settings(max_examples=examples(default))(test))
        # Ten thousand examples take longer than a test otherwise may.
        return pytest.mark.timeout(3600 if "DUOKA_FUZZ_EXAMPLES" in os.environ else 300)(marked)

    return decorate

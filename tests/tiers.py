"""Which cases are in `make test`, where any two of a test's (conftest.py) aren't the right ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import pytest

Case = TypeVar("Case")


def one_of_each(cases: Iterable[Case], kind: Callable[[Case], object]) -> list[Any]:
    """Parameters; those of a kind that stands further up are slow."""
    parameters, seen = [], set()
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        parameters.append(
            pytest.param(*values, marks=pytest.mark.slow if kind(case) in seen else ())
        )
        seen.add(kind(case))
    return parameters


def only(quick: Collection[Case], cases: Iterable[Case]) -> list[Any]:
    """Parameters; those that aren't among the quick ones are slow."""
    return [pytest.param(c, marks=() if c in quick else pytest.mark.slow) for c in cases]

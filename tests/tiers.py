"""Which cases of a test are in `make test`: one of each kind. `make test-all` runs all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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

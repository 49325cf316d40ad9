"""Of several checks in one test item each runs, and each that fails is named."""

from __future__ import annotations

import pytest
from checks import run_all


def test_all_run_and_each_failure_is_named() -> None:
    ran: list[str] = []

    def fail(name: str) -> None:
        ran.append(name)
        raise AssertionError(f"no {name}")

    run_all({"fine": lambda: ran.append("fine")})
    with pytest.raises(ExceptionGroup, match="failed checks: stages, engine") as caught:
        run_all(
            {
                "stages": lambda: fail("stages"),
                "pages": lambda: ran.append("pages"),
                "engine": lambda: fail("engine"),
            }
        )
    assert ran == ["fine", "stages", "pages", "engine"]
    assert [str(error) for error in caught.value.exceptions] == ["no stages", "no engine"]
    assert caught.value.exceptions[1].__notes__ == ["check: engine"]

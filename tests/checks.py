"""Several checks in one test item: each of them runs, and every failure is reported by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def run_all(checks: Mapping[str, Callable[[], object]]) -> None:
    """Run all checks, then raise one group with the exceptions of those that failed."""
    failures: dict[str, Exception] = {}
    for name, check in checks.items():
        try:
            check()
        except Exception as error:  # whatever it is, the other checks still run
            error.add_note(f"check: {name}")
            failures[name] = error
    if failures:
        raise ExceptionGroup(f"failed checks: {', '.join(failures)}", list(failures.values()))

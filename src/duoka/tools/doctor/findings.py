"""Findings: what a check says, and checks that don't stop one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from duoka.errors import DuokaError

Severity: TypeAlias = Literal["ok", "note", "skipped", "warning", "error"]
_BAD: tuple[Severity, ...] = ("error", "warning")


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    `text` says what there is, `meaning` what follows from it, `advice` what to do; `figures` are
    what was measured, for programs.
    """

    severity: Severity
    text: str
    meaning: str = ""
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """A check, and all that it found."""

    group: str
    name: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All checks, in the order in which they ran."""

    checks: tuple[Examined, ...]

    @property
    def severity(self) -> Severity:
        """The worst that was found; "ok" where nothing is wrong."""
        severities = {finding.severity for check in self.checks for finding in check.findings}
        return next((bad for bad in _BAD if bad in severities), "ok")


def examine(group: str, name: str, check: Callable[[], Iterable[Finding]]) -> Examined:
    """Run a check; what it raises is what it found, and the next one runs all the same."""
    findings: list[Finding] = []
    try:
        findings.extend(check())
    except DuokaError as error:
        findings.append(Finding("error", str(error), advice=error.hint or ""))
    except Exception as error:  # whatever a driver, a file or a library may come up with
        text = f"the check itself failed: {type(error).__name__}: {error}"
        findings.append(Finding("error", text, advice="please report it, with --bundle FILE"))
    return Examined(group=group, name=name, findings=tuple(findings))

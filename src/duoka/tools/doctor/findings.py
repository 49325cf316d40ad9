"""Findings: what a check says, and checks that don't stop one another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from duoka.errors import DuokaError

Severity: TypeAlias = Literal["ok", "note", "skipped", "warning", "error"]
_RANK: Mapping[Severity, int] = {"ok": 0, "note": 0, "skipped": 0, "warning": 1, "error": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
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


class Check(NamedTuple):
    """A question to the machine; `run` is called once, and may raise."""

    group: str
    name: str
    run: Callable[[], Iterable[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """A check, and all that it found."""

    group: str
    name: str
    findings: tuple[Finding, ...]

    @property
    def severity(self) -> Severity:
        """That of its worst finding."""
        return worst(finding.severity for finding in self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All checks, in the order in which they ran."""

    checks: tuple[Examined, ...]

    @property
    def severity(self) -> Severity:
        """That of the worst finding."""
        return worst(check.severity for check in self.checks)


def worst(severities: Iterable[Severity]) -> Severity:
    """The gravest of some; the first one of equals."""
    return max(severities, key=_RANK.__getitem__, default="ok")


def run_check(check: Check) -> Examined:
    """Run a check; what it raises is what it found, and the next one runs all the same."""
    findings: list[Finding] = []
    try:
        findings.extend(check.run())
    except DuokaError as error:
        findings.append(Finding(severity="error", text=str(error), advice=error.hint or ""))
    except Exception as error:  # whatever a driver, a file or a library may come up with
        findings.append(
            Finding(
                severity="error",
                text=f"the check itself failed: {type(error).__name__}: {error}",
                advice="please report it, with what `duoka doctor --bundle FILE` writes",
            )
        )
    return Examined(group=check.group, name=check.name, findings=tuple(findings))


def ok(text: str, **figures: Any) -> Finding:
    """Nothing to do."""
    return Finding(severity="ok", text=text, figures=figures)


def note(text: str, meaning: str = "", advice: str = "") -> Finding:
    """Something to know."""
    return Finding(severity="note", text=text, meaning=meaning, advice=advice)


def skipped(text: str, advice: str = "") -> Finding:
    """What couldn't be looked at."""
    return Finding(severity="skipped", text=text, advice=advice)


def warning(text: str, meaning: str, advice: str = "") -> Finding:
    """It works, and not as well as it could."""
    return Finding(severity="warning", text=text, meaning=meaning, advice=advice)


def error(text: str, meaning: str, advice: str = "") -> Finding:
    """It doesn't work, or can't be trusted."""
    return Finding(severity="error", text=text, meaning=meaning, advice=advice)

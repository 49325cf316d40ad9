"""Diagnosis: the checks, their order, and the conditions under which they run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from duoka.base.progress import say
from duoka.errors import DuokaError
from duoka.hardware.host import is_wsl

from . import devices, gpus, host, model
from .facts import BAD, Facts, Finding, Severity
from .model import ModelFacts

_GPU_CHECKS = (("GPUs", "CUDA", gpus.check_visible), ("GPUs", "memory", gpus.check_memory))
_HOST_CHECKS = (
    ("host", "memory", host.check_host_memory),
    ("software", "libraries", host.check_versions),
    ("software", "extras", host.check_extras),
)
_DEVICE_CHECKS = (
    ("software", "torch", devices.check_torch),
    ("computing", "matrices", devices.check_matrices),
    ("computing", "copies", devices.check_copies),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """A check and its findings."""

    group: str
    name: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All checks that ran, in order."""

    checks: tuple[Examined, ...]

    @property
    def severity(self) -> Severity:
        """Severity of the worst finding: "error", "warning", or "ok" for anything less."""
        severities = {finding.severity for check in self.checks for finding in check.findings}
        return next((bad for bad in BAD if bad in severities), "ok")


def diagnose(
    which: str | None = None, model_facts: ModelFacts | None = None, *, root: Path = Path("/")
) -> Diagnosis:
    """Run all checks of this machine, and of a model on it if `model_facts` is given.

    `which` names the GPUs to test and to plan the model for, by default all. Tests replace `root`,
    the directory with /sys, /proc and /dev.
    """
    return Diagnosis(checks=tuple(_examine_all(Facts(which, root), model_facts)))


def _examine_all(facts: Facts, model_facts: ModelFacts | None) -> Iterator[Examined]:
    """Run the checks in order; GPU checks need a driver, device checks testable devices."""
    yield examine("GPUs", "driver", gpus.check_driver, facts)
    if facts.machine is not None and is_wsl(facts.root):
        yield examine("GPUs", "WSL", gpus.check_wsl, facts)
    if facts.gpus is not None:
        yield examine("GPUs", "--gpus", gpus.check_named, facts)
    checks = (*(_GPU_CHECKS if facts.machine is not None else ()), *_HOST_CHECKS)
    if facts.machine is not None or facts.testable:
        say("testing the devices")
        checks += _DEVICE_CHECKS
    for group, name, check in checks:
        yield examine(group, name, check, facts)
    if model_facts is not None:
        yield examine("model", "checkpoint", model.check_whole, model_facts)
        yield examine("model", "fit", model.check_fit, model_facts, facts)


def examine(
    group: str, name: str, check: Callable[..., Iterable[Finding]], *facts: object
) -> Examined:
    """Run a check; an exception becomes a finding, so that the other checks still run."""
    findings: list[Finding] = []
    try:
        findings.extend(check(*facts))
    except DuokaError as error:
        findings.append(Finding("error", str(error), advice=error.hint or ""))
    except Exception as error:  # a driver, a file or a library may raise anything
        text = f"the check failed: {type(error).__name__}: {error}"
        findings.append(Finding("error", text, advice="please report it"))
    return Examined(group=group, name=name, findings=tuple(findings))

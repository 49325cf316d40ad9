"""Diagnosing: which checks there are, in which order, and on which machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from duoka.base.progress import say

from . import devices, gpus, host, model
from .facts import Facts
from .findings import Check, Diagnosis, Examined, Finding, run_check
from .model import ModelFacts

_GPU_CHECKS: tuple[tuple[str, str, Callable[[Facts], Iterable[Finding]]], ...] = (
    ("GPUs", "CUDA", gpus.check_visible),
    ("GPUs", "memory", gpus.check_memory),
    ("GPUs", "health", gpus.check_state),
    ("links", "PCIe", gpus.check_pcie),
    ("links", "NVLink", gpus.check_nvlink),
    ("links", "reach", gpus.check_reach),
    ("links", "NUMA", gpus.check_numa),
)
_HOST_CHECKS: tuple[tuple[str, str, Callable[[Facts], Iterable[Finding]]], ...] = (
    ("host", "memory", host.check_host_memory),
    ("host", "shared memory", host.check_shared_memory),
    ("host", "limits", host.check_limits),
    ("software", "libraries", host.check_versions),
)
_DEVICE_CHECKS: tuple[tuple[str, str, Callable[[Facts], Iterable[Finding]]], ...] = (
    ("software", "torch", devices.check_torch),
    ("computing", "matrices", devices.check_matrices),
    ("computing", "copies", devices.check_copies),
)


def diagnose(
    which: str | None = None, named: ModelFacts | None = None, *, root: Path = Path("/")
) -> Diagnosis:
    """Look at this machine, and at a model on it.

    `which` are the GPUs that tests run on and the model is planned for, by default all of this
    machine. What can't be understood of it is raised; nothing else is.
    """
    facts = Facts(which, root)
    if which is not None:
        assert facts.fleet is not None  # it is refused before anything is looked at
    return Diagnosis(checks=tuple(_examine(facts, named)))


def _examine(facts: Facts, named: ModelFacts | None) -> Iterator[Examined]:
    yield run_check(Check("GPUs", "driver", partial(gpus.check_driver, facts)))
    if facts.machine is not None:
        yield from _all(_GPU_CHECKS, facts)
    yield from _all(_HOST_CHECKS, facts)
    if facts.machine is not None or facts.testable:
        say("testing the devices")
        yield from _all(_DEVICE_CHECKS, facts)
    if named is not None:
        for name, check in (
            ("checkpoint", partial(model.check_whole, named)),
            ("disk", partial(model.check_disk, named)),
            ("hashes", partial(model.check_hashes, named)),
            ("fit", partial(model.check_fit, named, facts)),
        ):
            yield run_check(Check("model", name, check))


def _all(
    checks: Iterable[tuple[str, str, Callable[[Facts], Iterable[Finding]]]], facts: Facts
) -> Iterator[Examined]:
    for group, name, check in checks:
        yield run_check(Check(group, name, partial(check, facts)))

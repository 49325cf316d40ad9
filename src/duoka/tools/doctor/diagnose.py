"""Diagnosing: which checks there are, in which order, and on which machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

from duoka.base.progress import say

from . import devices, gpus, host, model
from .facts import Facts
from .findings import Diagnosis, Examined, Finding, examine
from .model import ModelFacts

_Checks = tuple[tuple[str, str, Callable[[Facts], Iterable[Finding]]], ...]

_GPU_CHECKS: _Checks = (
    ("GPUs", "CUDA", gpus.check_visible),
    ("GPUs", "memory", gpus.check_memory),
    ("GPUs", "health", gpus.check_state),
    ("links", "PCIe", gpus.check_pcie),
    ("links", "NVLink", gpus.check_nvlink),
    ("links", "reach", gpus.check_reach),
    ("links", "NUMA", gpus.check_numa),
)
_HOST_CHECKS: _Checks = (
    ("host", "memory", host.check_host_memory),
    ("host", "shared memory", host.check_shared_memory),
    ("host", "limits", host.check_limits),
    ("software", "libraries", host.check_versions),
)
_DEVICE_CHECKS: _Checks = (
    ("software", "torch", devices.check_torch),
    ("computing", "matrices", devices.check_matrices),
    ("computing", "copies", devices.check_copies),
)


def diagnose(
    which: str | None = None, named: ModelFacts | None = None, *, root: Path = Path("/")
) -> Diagnosis:
    """Look at this machine, and at a model on it.

    `which` are the GPUs that tests run on and the model is planned for, by default all of this
    machine.
    """
    return Diagnosis(checks=tuple(_examine(Facts(which, root), named)))


def _examine(facts: Facts, named: ModelFacts | None) -> Iterator[Examined]:
    yield examine("GPUs", "driver", partial(gpus.check_driver, facts))
    if facts.gpus is not None:
        yield examine("GPUs", "--gpus", partial(gpus.check_named, facts))
    checks = (*(_GPU_CHECKS if facts.machine is not None else ()), *_HOST_CHECKS)
    if facts.machine is not None or facts.testable:
        say("testing the devices")
        checks += _DEVICE_CHECKS
    for group, name, check in checks:
        yield examine(group, name, partial(check, facts))
    if named is not None:
        yield examine("model", "checkpoint", partial(model.check_whole, named))
        yield examine("model", "disk", partial(model.check_disk, named))
        yield examine("model", "hashes", partial(model.check_hashes, named))
        yield examine("model", "fit", partial(model.check_fit, named, facts))

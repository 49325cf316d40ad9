"""The parts of a self-test, and its report."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from duoka.base.progress import say
from duoka.base.requirements import installed_libraries
from duoka.base.serialization import to_dict
from duoka.base.units import format_count
from duoka.errors import FleetError
from duoka.hardware import nvml
from duoka.hardware.fleet import Fleet
from duoka.tools.bench.calibrate import kinds
from duoka.tools.doctor import Diagnosis, Examined, Finding, examine, to_masked_json
from duoka.tools.doctor.devices import check_copies, check_matrices
from duoka.tools.doctor.facts import Facts, run_child

from .checkpoint import write_checkpoint

_PART_SECONDS = 900
_PATH = re.compile(r"(?<![\w.)])~?/[^\s'\",:;]+")


def run_selftest(gpus: str, *, quick: bool = False) -> Diagnosis:
    """Test GPUs of this machine, each alone and all together; `quick` uses a tiny model.

    Raises
    ------
    FleetError
        If there is no GPU, or one is virtual or only declared.
    """
    fleet = Fleet.parse(gpus)
    absent = [device.name for device in fleet.devices if not device.uuid]
    if absent:
        raise FleetError(
            f"the self-test needs GPUs of this machine; {', '.join(absent)} is none of them",
            hint="use indices of nvidia-smi: --gpus 0,1; `duoka gpus` lists them",
        )
    return Diagnosis(checks=tuple(_run_parts(gpus, fleet, quick)))


def _run_parts(gpus: str, fleet: Fleet, quick: bool) -> Iterator[Examined]:
    """Run all parts: numbers of all GPUs, then workloads on one GPU of each kind and on all."""
    facts = Facts(gpus, Path("/"))
    say("copies and matrix products")
    yield examine("numbers", "matrices", check_matrices, facts)
    yield examine("numbers", "copies", check_copies, facts)
    yield _run_part("numbers", "kernels", fleet)
    fleets = [fleet.only([device.name]) for device in kinds(fleet)]
    fleets += [fleet] if len(fleet.devices) > 1 else []
    with tempfile.TemporaryDirectory(prefix="duoka-selftest-") as directory:
        say("writing random weights")
        writing = examine("", "checkpoint", _write, Path(directory), fleet, quick)
        if writing.findings:
            yield writing
            return
        options: dict[str, Any] = {"directory": directory, "quick": quick}
        for part in fleets:
            group = f"{format_count(len(part.devices), 'GPU')}: {', '.join(part.names)}"
            yield _run_part(group, "engine", part, graphs=True, **options)
            yield _run_part(group, "engine", part, " --no-graphs", graphs=False, **options)
            yield _run_part(group, "tune", part, **options)


def _write(directory: Path, fleet: Fleet, quick: bool) -> tuple[Finding, ...]:
    """Write the checkpoint of the workloads; there are no findings unless that fails."""
    write_checkpoint(directory, fleet, quick=quick)
    return ()


def _run_part(group: str, name: str, fleet: Fleet, suffix: str = "", **options: object) -> Examined:
    """Run a part in a process of its own; its failure is a finding."""
    say(f"{group}: {name}{suffix}")
    uuids = ",".join(device.uuid for device in fleet.devices)
    request = {"part": name, "gpus": uuids, **options}
    lines, ending = run_child("duoka.tools.selftest", request, _PART_SECONDS)
    findings = [Finding(**line) for line in lines]
    if ending:
        findings.append(Finding("error", ending))
    return Examined(group=group, name=f"{name}{suffix}", findings=tuple(findings))


def to_report(diagnosis: Diagnosis, redact: Callable[[str], str]) -> str:
    """Return a self-test as JSON, without names of users, hosts, files and GPUs (UUIDs)."""
    machine = nvml.read()
    report = {
        "duoka_selftest": 1,
        "severity": diagnosis.severity,
        "driver": machine.driver_version,
        "gpus": [{"name": gpu.name, "total_bytes": gpu.total_bytes} for gpu in machine.gpus],
        "libraries": installed_libraries(),
        **to_dict(diagnosis),
    }
    return to_masked_json(report, lambda text: _PATH.sub("***", redact(text)))

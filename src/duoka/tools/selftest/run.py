"""The parts of a self-test, in order."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from duoka.base.progress import say
from duoka.errors import FleetError
from duoka.hardware.fleet import Fleet
from duoka.tools.bench.calibrate import kinds
from duoka.tools.doctor import Diagnosis, Examined, Finding
from duoka.tools.doctor.devices import check_copies, check_matrices
from duoka.tools.doctor.diagnose import examine
from duoka.tools.doctor.facts import Facts, run_child
from duoka.tools.doctor.gpus import check_driver

from .checkpoint import write_checkpoint

_PART_SECONDS = 900


def run_selftest(gpus: str, *, quick: bool = False) -> Diagnosis:
    """Test GPUs of this machine, one of each kind and all together; `quick` uses a tiny model.

    Raises
    ------
    FleetError
        If there is no GPU, or one is virtual or only declared.
    """
    fleet = Fleet.parse(gpus)
    if not all(device.uuid for device in fleet.devices):
        text = "the self-test needs GPUs of this machine, not virtual or declared ones"
        raise FleetError(text, hint="use indices of nvidia-smi: --gpus 0,1")
    return Diagnosis(checks=tuple(_run_parts(Facts(gpus, Path("/")), fleet, quick)))


def _run_parts(facts: Facts, fleet: Fleet, quick: bool) -> Iterator[Examined]:
    """Run the comparisons on each GPU, then workloads on one GPU of each kind and on all."""
    yield examine("numbers", "driver", check_driver, facts)
    yield examine("numbers", "matrices", check_matrices, facts)
    yield examine("numbers", "copies", check_copies, facts)
    for device in fleet.devices:
        yield _run_part("kernels", device.name, fleet.only([device.name]))
    fleets = dict.fromkeys([(device.name,) for device in kinds(fleet)] + [fleet.names])
    with tempfile.TemporaryDirectory(prefix="duoka-selftest-") as directory:
        say("writing random weights")
        write_checkpoint(Path(directory), fleet, quick=quick)
        for names in fleets:
            group, tested = " + ".join(names), fleet.only(names)
            for suffix, graphs in ((", CUDA graphs", True), (", --no-graphs", False)):
                options = {"directory": directory, "graphs": graphs}
                yield _run_part("engine", group + suffix, tested, **options)
            yield _run_part("tune", group, tested, directory=directory)


def _run_part(part: str, group: str, fleet: Fleet, **options: object) -> Examined:
    """Run a part in a process of its own; its failure is a finding."""
    say(f"{part}: {group}")
    uuids = ",".join(device.uuid for device in fleet.devices)
    request = {"part": part, "gpus": uuids, "options": options}
    lines, ending = run_child("duoka.tools.selftest.parts", request, _PART_SECONDS)
    lines += [{"severity": "error", "text": ending}] if ending else []
    return Examined(group=group, name=part, findings=tuple(Finding(**line) for line in lines))

"""Facts shared by several checks; the finding; and the tests on devices.

The tests run in a child process. A test that hangs or ends CUDA is recorded as failed, and the
remaining tests run in a new process, at most four times.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from duoka.errors import FleetError
from duoka.hardware import detect, nvml
from duoka.hardware.detect import PresentGpu
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet

Test: TypeAlias = tuple[str, ...]
"""Kind of test, "matrix" or "copy", and the devices' names."""
Severity: TypeAlias = Literal["ok", "note", "skipped", "warning", "error"]
BAD: tuple[Severity, ...] = ("error", "warning")
_MOST_NAMES = 6
_START_SECONDS, _TEST_SECONDS = 90, 3
_MOST_STARTS = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of a check: the fact, its consequence, the advice; `figures` are measured values."""

    severity: Severity
    text: str
    meaning: str = ""
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """Facts about torch's build, and the outcome of each test on devices."""

    torch: Mapping[str, Any]
    outcomes: Mapping[Test, Mapping[str, Any]]


class Facts:
    """Facts about the machine; `machine` is None until NVML has answered."""

    def __init__(self, gpus: str | None, root: Path) -> None:
        self.gpus = gpus
        self.root = root
        self.machine: nvml.Machine | None = None

    @property
    def cards(self) -> Sequence[nvml.NvmlGpu]:
        """Answering GPUs named by ``--gpus``, or all."""
        gpus = () if self.machine is None else self.machine.gpus
        return [gpu for gpu in gpus if self.is_meant(gpu.index)]

    def is_meant(self, index: int) -> bool:
        """Return True for a GPU named by ``--gpus``, and without names for every GPU."""
        return not self._named_indices or index in self._named_indices

    @cached_property
    def _named_indices(self) -> set[int]:
        uuids = {gpu.uuid for gpu in self.fleet.devices} if self.gpus and self.fleet else ()
        return {gpu.gpu.index for gpu in self.present if gpu.part.uuid in uuids}

    @cached_property
    def present(self) -> list[PresentGpu]:
        """All GPUs, each with the reason if unusable."""
        return detect.survey()[0]

    @cached_property
    def fleet(self) -> Fleet | None:
        """Devices named by ``--gpus``; None without any."""
        with suppress(FleetError):
            return Fleet.parse(self.gpus or "all") if self.gpus or self.machine else None
        return None

    @property
    def testable(self) -> Sequence[Device]:
        """Devices, real or virtual, to run tests on."""
        devices = self.fleet.devices if self.fleet is not None else ()
        return devices if all(gpu.uuid or gpu.name.startswith("vgpu") for gpu in devices) else ()

    @cached_property
    def probed(self) -> Probed:
        """Outcomes of the tests of torch and the devices."""
        return probe(self.testable)


def by_gpu(
    gpus: Iterable[nvml.NvmlGpu], check: Callable[[nvml.NvmlGpu], Iterable[Finding]]
) -> Iterator[Finding]:
    """Run a check on each GPU; merge equal findings into one."""
    indices: dict[Finding, list[int]] = {}
    for gpu in gpus:
        for finding in check(gpu):
            indices.setdefault(finding, []).append(gpu.index)
    for finding, numbers in indices.items():
        plural = "s" if len(numbers) > 1 else ""
        yield replace(finding, text=f"GPU{plural} {', '.join(map(str, numbers))}: {finding.text}")


def or_ok(findings: Iterable[Finding], text: str) -> Iterator[Finding]:
    """Yield findings, and a closing "ok" if none is a warning or an error."""
    is_bad = False
    for finding in findings:
        is_bad |= finding.severity in BAD
        yield finding
    if not is_bad:
        yield Finding("ok", text)


def join_names(names: Iterable[object]) -> str:
    """Join names, at most six of them."""
    texts = [*map(str, names)]
    rest = f" and {len(texts) - _MOST_NAMES} more" if len(texts) > _MOST_NAMES else ""
    return ", ".join(texts[:_MOST_NAMES]) + rest


# A test can hang in the driver, or end CUDA for its process. So a child runs the tests in order,
# and writes a line of JSON about torch and then one after each test. When it hangs or dies, the
# number of lines tells which test it was: that one has failed, and a new child gets the remaining
# ones.
#
#   tests  matrix 0, matrix 1, copy 0→1, copy 1→0      lines: torch, matrix 0, matrix 1, then killed
#   next   copy 1→0                                    copy 0→1 "didn't end within 102 seconds"
def probe(devices: Sequence[Device]) -> Probed:
    """Test each device, and each ordered pair of them."""
    names = [device.name for device in devices]
    waiting: list[Test] = [("matrix", name) for name in names]
    waiting += [("copy", *pair) for pair in itertools.permutations(names, 2)]
    capacities = [device.budget_bytes for device in devices if device.name.startswith("vgpu")]
    about: Mapping[str, Any] = {}
    outcomes: dict[Test, Mapping[str, Any]] = {}
    for _ in range(_MOST_STARTS):
        lines, ending = _run({"capacities_bytes": capacities, "tests": waiting})
        if not lines:
            return Probed(torch=about or {"error": ending}, outcomes=outcomes)
        about = about or lines[0]
        results = [*lines[1:], *([{"fault": ending, "raised": True}] if ending else [])]
        outcomes |= dict(zip(waiting, results, strict=False))
        waiting = waiting[len(results) :]
        if not waiting:
            break
    outcomes |= {test: {"skipped": "skipped after too many failures"} for test in waiting}
    return Probed(torch=about, outcomes=outcomes)


def _run(request: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Return the complete lines of a test process, and the description of its failure."""
    seconds = _START_SECONDS + _TEST_SECONDS * len(request["tests"])
    command = [sys.executable, "-m", "duoka.tools.doctor.device_tests", json.dumps(request)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
        output, ending = done.stdout, ""
        if done.returncode:
            last_line = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            ending = f"its process ended with {done.returncode} {' '.join(last_line)[:200]}".strip()
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f"no result within {seconds} seconds"
    lines = output.rpartition(b"\n")[0].splitlines()
    return [json.loads(line) for line in lines if line.startswith(b"{")], ending

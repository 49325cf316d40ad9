"""Facts shared by several checks, the finding of a check, and the start of device tests.

The tests run in a child process. A test that hangs or ends its process is recorded as failed, and
the remaining tests run in a new process; at most four processes are started.
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
"""Kind of a test ("matrix" or "copy"), then the names of its devices."""
Severity: TypeAlias = Literal["ok", "note", "skipped", "warning", "error"]
BAD: tuple[Severity, ...] = ("error", "warning")
_MAX_NAMES = 6
_START_SECONDS, _TEST_SECONDS = 90, 3
_MAX_STARTS = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding of a check: `text` is the fact, `meaning` its consequence; `figures` are measured."""

    severity: Severity
    text: str
    meaning: str = ""
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """Facts about torch's build, and the outcome of each device test."""

    torch: Mapping[str, Any]
    outcomes: Mapping[Test, Mapping[str, Any]]


class Facts:
    """Facts about the machine.

    `gpus` is the value of ``--gpus``, None for all GPUs. `machine` is None until `check_driver` has
    read it, and stays None without an NVIDIA driver.
    """

    def __init__(self, gpus: str | None, root: Path) -> None:
        self.gpus = gpus
        self.root = root
        self.machine: nvml.Machine | None = None

    @property
    def cards(self) -> Sequence[nvml.NvmlGpu]:
        """Responding GPUs named by ``--gpus``; all responding GPUs without names."""
        gpus = () if self.machine is None else self.machine.gpus
        return [gpu for gpu in gpus if self.is_meant(gpu.index)]

    def is_meant(self, index: int) -> bool:
        """Return True if ``--gpus`` names the GPU, or names no GPU of this machine."""
        return not self._named_indices or index in self._named_indices

    @cached_property
    def _named_indices(self) -> set[int]:
        """Indices of this machine's GPUs that ``--gpus`` names."""
        uuids = {gpu.uuid for gpu in self.fleet.devices} if self.gpus and self.fleet else ()
        return {gpu.gpu.index for gpu in self.present if gpu.part.uuid in uuids}

    @cached_property
    def present(self) -> list[PresentGpu]:
        """All GPUs of this machine; an unusable GPU has the reason."""
        return detect.survey()[0]

    @cached_property
    def fleet(self) -> Fleet | None:
        """Devices named by ``--gpus``, or all GPUs; None if there are none or a name is wrong."""
        with suppress(FleetError):
            return Fleet.parse(self.gpus or "all") if self.gpus or self.machine else None
        return None

    @property
    def testable(self) -> Sequence[Device]:
        """Real or virtual devices to run tests on; none if a GPU is only declared."""
        devices = self.fleet.devices if self.fleet is not None else ()
        return devices if all(gpu.uuid or gpu.name.startswith("vgpu") for gpu in devices) else ()

    @cached_property
    def probed(self) -> Probed:
        """Outcomes of the tests, which run on first access."""
        return probe(self.testable)


def by_gpu(
    gpus: Iterable[nvml.NvmlGpu], check: Callable[[nvml.NvmlGpu], Iterable[Finding]]
) -> Iterator[Finding]:
    """Run a check on each GPU; equal findings of several GPUs become one finding."""
    indices: dict[Finding, list[int]] = {}
    for gpu in gpus:
        for finding in check(gpu):
            indices.setdefault(finding, []).append(gpu.index)
    for finding, numbers in indices.items():
        plural = "s" if len(numbers) > 1 else ""
        yield replace(finding, text=f"GPU{plural} {', '.join(map(str, numbers))}: {finding.text}")


def or_ok(findings: Iterable[Finding], text: str) -> Iterator[Finding]:
    """Yield the findings, then an "ok" with `text` if none is a warning or an error."""
    is_bad = False
    for finding in findings:
        is_bad |= finding.severity in BAD
        yield finding
    if not is_bad:
        yield Finding("ok", text)


def join_names(names: Iterable[object]) -> str:
    """Join names with commas; after six names only the number of others is given."""
    texts = [*map(str, names)]
    rest = f" and {len(texts) - _MAX_NAMES} more" if len(texts) > _MAX_NAMES else ""
    return ", ".join(texts[:_MAX_NAMES]) + rest


# A test can hang in the driver, or make CUDA unusable in its process. Therefore a child process
# runs the tests in order, and writes one line of JSON about torch and one line after each test. If
# the child hangs or dies, the number of lines identifies the failed test, and a new child runs the
# remaining tests:
#
#   child 1  tests matrix 0, matrix 1, copy 0→1, copy 1→0; lines: torch, matrix 0, matrix 1
#            killed after 102 seconds: copy 0→1 has failed, "no result within 102 seconds"
#   child 2  test copy 1→0
def probe(devices: Sequence[Device]) -> Probed:
    """Test each device, and each ordered pair of them."""
    names = [device.name for device in devices]
    waiting: list[Test] = [("matrix", name) for name in names]
    waiting += [("copy", *pair) for pair in itertools.permutations(names, 2)]
    capacities = [device.budget_bytes for device in devices if device.name.startswith("vgpu")]
    about: Mapping[str, Any] = {}
    outcomes: dict[Test, Mapping[str, Any]] = {}
    for _ in range(_MAX_STARTS):
        lines, ending = run_child(
            "duoka.tools.doctor.device_tests",
            {"capacities_bytes": capacities, "tests": waiting},
            _START_SECONDS + _TEST_SECONDS * len(waiting),
        )
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


def run_child(
    module: str, request: Mapping[str, Any], seconds: int
) -> tuple[list[dict[str, Any]], str]:
    """Run a module as a child process with a request in JSON, for at most `seconds`.

    Returns its complete lines of JSON, and its failure as text or "".
    """
    command = [sys.executable, "-m", module, json.dumps(request)]
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

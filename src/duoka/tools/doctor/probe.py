"""Probing: the tests on devices are run elsewhere, again without one that hangs or ends CUDA."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from duoka.hardware.device import Device

Test: TypeAlias = tuple[str, ...]
"""Its kind, "matrix" or "copy", and the devices' names."""

_MODULE = "duoka.tools.doctor.device_tests"
_START_SECONDS, _TEST_SECONDS = 90, 3
_MOST_STARTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What torch says of itself, and what came of each test."""

    torch: Mapping[str, Any]
    outcomes: Mapping[Test, Mapping[str, Any]]


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
    outcomes |= {test: {"skipped": "too many tests before it have failed"} for test in waiting}
    return Probed(torch=about, outcomes=outcomes)


def _run(request: Mapping[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """What a process wrote, whole lines of its own, and how it ended if that wasn't by itself."""
    seconds = _START_SECONDS + _TEST_SECONDS * len(request["tests"])
    command = [sys.executable, "-m", _MODULE, json.dumps(request)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False
        )
        output, ending = done.stdout, ""
        if done.returncode:
            last = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
            ending = f"its process ended with {done.returncode} {' '.join(last)[:200]}".strip()
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f"it didn't end within {seconds} seconds"
    lines = output.rpartition(b"\n")[0].splitlines()
    return [json.loads(line) for line in lines if line.startswith(b"{")], ending

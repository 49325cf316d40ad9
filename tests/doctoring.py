"""Recorded machines under the doctor's eyes; what devices would do is stated by the test."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from recordings import Recording, replay

from duoka.hardware import cuda_driver
from duoka.hardware.device import Device
from duoka.tools.doctor import facts, host
from duoka.tools.doctor.diagnose import diagnose
from duoka.tools.doctor.facts import Finding, Probed, Test

TORCH = {
    "version": "2.13.0+cu126",
    "cuda": "12.6",
    "architectures": ["sm_75", "sm_80", "sm_86", "sm_90", "compute_90"],
}
SOUND = {"fault": "", "bytes_per_second": 300e9, "latency_seconds": 1e-5, "direct": True}


def machine(
    patch: pytest.MonkeyPatch,
    name: str,
    visible: Sequence[int | str] | None = None,
    *,
    torch: dict[str, Any] | None = None,
    outcomes: dict[Test, dict[str, Any]] | None = None,
) -> Recording:
    """Make a recorded machine this one, whose devices are sound but for some outcomes.

    All extras are installed there.
    """
    recording = replay(patch, name, visible)
    patch.delenv(cuda_driver.VARIABLE, raising=False)

    def probed(devices: Sequence[Device]) -> Probed:
        names = [device.name for device in devices]
        tests: list[Test] = [("matrix", one) for one in names]
        tests += [("copy", *pair) for pair in itertools.permutations(names, 2)]
        about = {**TORCH, "uuids": list(cuda_driver.visible_uuids()), **(torch or {})}
        return Probed(torch=about, outcomes=dict.fromkeys(tests, SOUND) | (outcomes or {}))

    patch.setattr(facts, "probe", probed)
    patch.setattr(host, "missing_extras", list)
    patch.setattr(host, "CompiledMemory", object)
    return recording


def eight_h100(patch: pytest.MonkeyPatch, recording: Recording) -> None:
    """Make eight of the four H100 that were recorded."""
    devices = recording.data["devices"]
    for number, device in enumerate(copy.deepcopy(devices), len(devices)):
        device["nvmlDeviceGetUUID"] = device["nvmlDeviceGetUUID"][:-2] + f"f{number}"
        device["nvmlDeviceGetPciInfo"]["busId"] = f"00000000:{0x90 + number:X}:00.0"
        devices.append(device)
    for place, device in enumerate(devices):
        device["nvmlDeviceGetP2PStatus"] = [int(at == place) for at in range(len(devices))]
    uuids = tuple(uuid.removeprefix("GPU-") for uuid in recording.uuids)
    patch.setattr(cuda_driver, "visible_uuids", lambda: uuids)


def findings(root: Path, *groups: str) -> dict[str, list[Finding]]:
    """What the doctor finds of this machine, by check, but for what is all right."""
    checks = diagnose(root=root).checks
    return {
        check.name: troubled
        for check in checks
        if check.group in groups
        if (troubled := [finding for finding in check.findings if finding.severity != "ok"])
    }

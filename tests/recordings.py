"""Machines with GPUs, replayed: NVML's answers from a file, and the CUDA driver's beside them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from duoka.hardware import cuda_driver, nvml

DIRECTORY = Path(__file__).parent / "data" / "nvml"
NAMES = sorted(path.stem for path in DIRECTORY.glob("*.json"))
_NOT_SUPPORTED = {"error": pynvml.NVML_ERROR_NOT_SUPPORTED}
_INVALID = {"error": pynvml.NVML_ERROR_INVALID_ARGUMENT}


def answer(told: Any) -> Any:
    """What a function returns for a recorded value; a recorded error is raised."""
    if isinstance(told, dict) and "error" in told:
        raise pynvml.NVMLError(told["error"])
    if isinstance(told, dict):
        return SimpleNamespace(**told)
    if isinstance(told, list) and told and isinstance(told[0], dict):
        return [answer(each) for each in told]
    return told


def _field(value: int | None) -> SimpleNamespace:
    result = pynvml.NVML_ERROR_NOT_SUPPORTED if value is None else pynvml.NVML_SUCCESS
    return SimpleNamespace(
        nvmlReturn=result, value=SimpleNamespace(uiVal=value or 0, ullVal=value or 0)
    )


def _recorded(device: dict[str, Any], name: str, *arguments: Any) -> Any:
    """What is recorded for these arguments, or for any."""
    special = f"{name}({arguments[0]})" if arguments else name
    return device.get(special, device.get(name, _NOT_SUPPORTED))


class Recording:
    """Stands for the module `pynvml`; a handle is the recorded device itself."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.open_sessions = 0

    @classmethod
    def load(cls, name: str) -> Recording:
        return cls(json.loads((DIRECTORY / f"{name}.json").read_text(encoding="utf-8")))

    @property
    def uuids(self) -> list[str]:
        return [device["nvmlDeviceGetUUID"] for device in self.data["devices"]]

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)  # constants and exceptions, and only names that there are
        if not name.startswith("nvml") or not callable(real):
            return real
        if name.startswith("nvmlDeviceGetNvLink"):
            return lambda device, link: answer(self._link(device, link).get(name, _NOT_SUPPORTED))
        if name.startswith("nvmlDeviceGet"):
            return lambda device, *of: answer(_recorded(device, name, *of))
        return lambda: answer(self.data.get(name, _NOT_SUPPORTED))

    def _link(self, device: dict[str, Any], link: int) -> dict[str, Any]:
        links = device.get("nvlinks", [])
        state = _INVALID if links else _NOT_SUPPORTED
        return links[link] if link < len(links) else {"nvmlDeviceGetNvLinkState": state}

    def nvmlInit(self) -> None:  # noqa: N802
        answer(self.data.get("nvmlInitWithFlags"))
        self.open_sessions += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open_sessions -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        answer(self.data.get("nvmlDeviceGetCount"))
        return len(self.data["devices"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:  # noqa: N802
        device: dict[str, Any] = self.data["devices"][index]
        answer({"error": device["error"]} if "error" in device else None)
        return device

    def nvmlDeviceGetMemoryInfo(  # noqa: N802
        self, device: dict[str, Any], version: int | None = None
    ) -> Any:
        assert version in (None, pynvml.nvmlMemory_v2)
        name = "nvmlDeviceGetMemoryInfo" + ("_v2" if version else "")
        return answer(device.get(name, _NOT_SUPPORTED))

    def nvmlDeviceGetFieldValues(  # noqa: N802
        self, device: dict[str, Any], fields: list[int]
    ) -> list[Any]:
        if fields == [pynvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON]:
            values = [device.get("nvlink_speed_mbps")]
        else:
            assert fields == [(138, 2**32 - 1), (139, 2**32 - 1)]
            values = device.get("nvlink_kib") or [None, None]
        return [_field(value) for value in values]

    def nvmlDeviceGetP2PStatus(  # noqa: N802
        self, device: dict[str, Any], peer: dict[str, Any], index: int
    ) -> int:
        assert index == 0  # NVML_P2P_CAPS_INDEX_READ
        statuses = device.get("nvmlDeviceGetP2PStatus", _NOT_SUPPORTED)
        place = next(at for at, other in enumerate(self.data["devices"]) if other is peer)
        status: int = answer(statuses if isinstance(statuses, dict) else statuses[place])
        return status

    def nvmlDeviceGetMigDeviceHandleByIndex(  # noqa: N802
        self, device: dict[str, Any], index: int
    ) -> dict[str, Any]:
        part: dict[str, Any] = device["instances"][index]
        answer(part if "error" in part else None)
        return part

    def nvmlSystemGetProcessName(self, pid: int) -> str:  # noqa: N802
        names = self.data.get("nvmlSystemGetProcessName", {})
        name: str = answer(names.get(str(pid), {"error": pynvml.NVML_ERROR_NOT_FOUND}))
        return name


def replay(
    patch: pytest.MonkeyPatch, name: str, visible: Sequence[int | str] | None = None
) -> Recording:
    """Make a recorded machine this one.

    Parameters
    ----------
    visible : sequence of int or str, optional
        What the CUDA driver shows this process, in its order: indices of NVML, or UUIDs. By
        default every device, in NVML's order.
    """
    recording = Recording.load(name)
    patch.setattr(nvml, "pynvml", recording)
    devices = recording.data.get("devices", [])
    shown = range(len(devices)) if visible is None else visible
    uuids = [
        each if isinstance(each, str) else devices[each].get("nvmlDeviceGetUUID", "GPU-lost")
        for each in shown
    ]
    bare = tuple(uuid.removeprefix("GPU-").removeprefix("MIG-") for uuid in uuids)
    patch.setattr(cuda_driver, "visible_uuids", lambda: bare)
    return recording

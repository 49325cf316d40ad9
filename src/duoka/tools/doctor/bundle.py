"""Report to attach to an issue; user and host names, home directories and UUIDs are masked."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from duoka.base.requirements import installed_libraries
from duoka.base.serialization import to_dict

from .diagnose import Diagnosis

_MASK = "***"
# Environment variables that affect how a model runs, except secrets.
_VARIABLES = re.compile(
    r"(?!.*(?:TOKEN|KEY|SECRET|PASSWORD))(CUDA|NCCL|NVIDIA|TORCH|PYTORCH|OMP|MKL|DUOKA|TRANSFORMERS)_\w+|LD_LIBRARY_PATH|LD_PRELOAD|"
    r"HF_(HOME|HUB_CACHE|HUB_OFFLINE|ENDPOINT)"
)
_UUID = re.compile(
    r"(?:\b(?:GPU|MIG)-)?\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.I
)
_HOMES = re.compile(r"(/home/|/Users/)[^/\s\"',:]+")
_COMMON_NAMES = frozenset({"root", "localhost", "user", "ubuntu"})  # names that identify nobody


def bundle(diagnosis: Diagnosis, redact: Callable[[str], str]) -> str:
    """Return the diagnosis, libraries and settings as JSON, with identifying names masked.

    `redact` removes tokens and passwords from a text.
    """
    report: dict[str, Any] = {
        "duoka_doctor": 1,
        "severity": diagnosis.severity,
        "system": {
            "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "processors": os.cpu_count(),
        },
        "environment": {n: v for n, v in sorted(os.environ.items()) if _VARIABLES.fullmatch(n)},
        "libraries": installed_libraries(),
        **to_dict(diagnosis),
    }
    home = os.path.expanduser("~")  # noqa: PTH111 (Path.home raises where there is none)
    names = {socket.gethostname(), Path(home).name}
    names |= {os.environ.get(name, "") for name in ("HOSTNAME", "USER", "LOGNAME", "SUDO_USER")}
    names = {*names, *(name.partition(".")[0] for name in names)} - _COMMON_NAMES
    # Names of a single letter are not masked: they occur in every text.
    words = "|".join(re.escape(n) for n in sorted(names, key=len, reverse=True) if len(n) > 1)
    private = re.compile(rf"(?<![A-Za-z0-9])(?:{words})(?![A-Za-z0-9])") if words else _UUID

    def mask(text: str) -> str:
        text = redact(text).replace(home, "~") if len(home) > 1 else redact(text)
        text = _UUID.sub(_MASK, _HOMES.sub(rf"\1{_MASK}", text))
        return private.sub(_MASK, text)

    return json.dumps(_map_texts(report, mask), ensure_ascii=False, indent=1) + "\n"


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Apply a function to every string in a JSON value, except keys."""
    if isinstance(value, dict):
        return {key: _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    return change(value) if isinstance(value, str) else value

"""Profiles on disk: a model is traced once for each of its versions and settings.

A cached profile answers without torch: the versions it was made with are read from the installed
packages' metadata, not from the packages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from duoka.base.files import cache_directory, keep, read_text
from duoka.base.serialization import from_dict, parse_json_object, to_dict
from duoka.errors import FormatError
from duoka.hardware.gpu_generation import GpuGeneration

from .profile import Profile
from .workload import Workload

_VERSION = 32
_NO_GENERATION = GpuGeneration(0, expandable_segments=False)
_MOST_BYTES = 2**30
_PACKAGES = ("torch", "transformers", "duoka")


def find_profile(fingerprint: str, workload: Workload) -> Profile | None:
    """Return the cached profile of a checkpoint for a workload, or None if there is none.

    A profile for all workloads is preferred to a profile for this workload alone.
    """
    versions = _versions()
    for alone in (False, True):
        key = _key(fingerprint, workload, versions, alone=alone)
        try:
            content = read_text(_path(key), most_bytes=_MOST_BYTES)
            profile = from_dict(Profile, parse_json_object(content, "the profile"))
            if profile.answers(workload.batch):
                return profile
        except (OSError, ValueError, FormatError):
            continue
    return None


def keep_profile(profile: Profile, workload: Workload, *, alone: bool = False) -> None:
    """Cache a profile for all workloads under the same conditions, or for this workload alone.

    Errors of the file system are ignored.
    """
    path = _path(_key(profile.fingerprint, workload, _versions(), alone=alone))
    keep(path, json.dumps(to_dict(profile)))


def _key(fingerprint: str, workload: Workload, versions: Mapping[str, str], *, alone: bool) -> str:
    """Return the file name of a profile: a hash of everything that the profile depends on."""
    parts = {
        "format": _VERSION,
        "fingerprint": fingerprint,
        "dtype": workload.dtype,
        "conditions": to_dict(workload.conditions),
        # Traces have no workspaces; the rest of the GPU generation is part of the conditions.
        "workload": to_dict(replace(workload, gpu_generation=_NO_GENERATION)) if alone else None,
        **versions,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _path(key: str) -> Path:
    """Return the path of a cached profile."""
    return cache_directory() / "profiles" / f"{key}.json"


def _versions() -> dict[str, str]:
    """Return the installed version of each package; an empty string if not installed."""
    versions = dict.fromkeys(_PACKAGES, "")
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions

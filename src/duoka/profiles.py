"""Profiles on disk: a model is traced once for each of its versions and settings.

A cached profile answers without torch: the versions it was made with are read from the installed
packages' metadata, not from the packages.
"""

from __future__ import annotations

import hashlib
import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .errors import FormatError
from .plans import write_whole
from .profile import Profile
from .serial import from_dict, to_dict

_VERSION = 1
_PACKAGES = ("torch", "transformers", "duoka")


def cache_directory() -> Path:
    """Where profiles are kept: DUOKA_CACHE, or `duoka` in the user's cache directory."""
    named = os.environ.get("DUOKA_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "duoka"


def profile_key(fingerprint: str, dtype: str) -> str:
    """What a profile depends on, as text for a file's name."""
    versions = {name: _version(name) for name in _PACKAGES}
    parts = {"format": _VERSION, "fingerprint": fingerprint, "dtype": dtype, **versions}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def read_profile(key: str) -> Profile | None:
    """The cached profile; None when there is none, or what is there can't be read."""
    try:
        text = _path(key).read_text(encoding="utf-8")
        return from_dict(Profile, json.loads(text))
    except (OSError, ValueError, FormatError):
        return None


def write_profile(key: str, profile: Profile) -> None:
    """Keep a profile. A cache that can't be written is no reason to fail."""
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(to_dict(profile)))
    except OSError:
        return


def _path(key: str) -> Path:
    return cache_directory() / "profiles" / f"{key}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

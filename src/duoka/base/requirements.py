"""The libraries that duoka stands on: what is installed, against the ranges it is tested with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def installed_version(name: str) -> str | None:
    """The version of a package; None where it isn't installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def unmet_requirements() -> list[str]:
    """Every library that is missing or of a version outside its range, with both."""
    wrong = []
    for name, requirement in _requirements(optional=False).items():
        installed = installed_version(name)
        if installed is None:
            wrong.append(f"{name} is not installed")
        elif not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{name} {installed} is installed, duoka needs {requirement.specifier}")
    return wrong


def unmet_extras() -> list[str]:
    """Libraries of extras that are installed in a version outside their range."""
    return [
        f"{name} {installed} is installed, duoka is tested with {requirement.specifier}"
        for name, requirement in _requirements(optional=True).items()
        if (installed := installed_version(name)) is not None
        and not requirement.specifier.contains(installed, prereleases=True)
    ]


def installed_libraries() -> dict[str, str]:
    """The versions of all libraries that duoka names and that are installed."""
    names = {*_requirements(optional=False), *_requirements(optional=True), "duoka"}
    versions = {name: installed_version(name) for name in sorted(names)}
    return {name: version for name, version in versions.items() if version is not None}


def _requirements(*, optional: bool) -> Mapping[str, Requirement]:
    from packaging.requirements import Requirement

    try:
        lines = requires("duoka") or []
    except PackageNotFoundError:
        return {}
    needed = map(Requirement, lines)
    return {one.name: one for one in needed if (one.marker is not None) == optional}

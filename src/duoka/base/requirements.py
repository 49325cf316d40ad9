"""Requirements: installed versions of libraries, compared with the supported ranges."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def installed_version(name: str) -> str | None:
    """Return a package's version; None if not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def unmet_requirements() -> list[str]:
    """Describe every missing library, and every version outside its range."""
    wrong = []
    for name, requirement in _requirements(optional=False).items():
        installed = installed_version(name)
        if installed is None:
            wrong.append(f"{name} is not installed")
        elif not requirement.specifier.contains(installed, prereleases=True):
            wrong.append(f"{name} {installed} is installed, duoka needs {requirement.specifier}")
    return wrong


def unmet_extras() -> list[str]:
    """Describe installed libraries of extras with a version outside their range."""
    return [
        f"{name} {installed} is installed, duoka is tested with {requirement.specifier}"
        for name, requirement in _requirements(optional=True).items()
        if (installed := installed_version(name)) is not None
        and not requirement.specifier.contains(installed, prereleases=True)
    ]


def installed_libraries() -> dict[str, str]:
    """Return the versions of all installed libraries among duoka's requirements."""
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
    return {
        requirement.name: requirement
        for requirement in needed
        if (requirement.marker is not None) == optional
    }

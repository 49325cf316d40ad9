"""Requirements: installed versions of libraries, compared with the supported ranges."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from duoka.errors import UsageError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def require_package(package: str, extra: str, who_needs: str) -> None:
    """Raise UsageError, such as "plots need matplotlib, …", if a package isn't installed."""
    if find_spec(package) is None:
        hint = f'pip install "duoka[{extra}]"'
        raise UsageError(f"{who_needs} {package}, which isn't installed", hint=hint)


def installed_version(name: str) -> str | None:
    """Return the version of a package; None if the package isn't installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def unmet_requirements() -> list[str]:
    """Describe every missing library, and every version outside its range."""
    missing = [name for name in _requirements(optional=False) if installed_version(name) is None]
    texts = [f"{name} is not installed" for name in missing]
    return [*texts, *versions_outside_range(optional=False)]


def versions_outside_range(*, optional: bool) -> list[str]:
    """Describe installed libraries, required or optional ones, in unsupported versions."""
    return [
        f"{name} {installed} is installed, duoka needs {requirement.specifier}"
        for name, requirement in _requirements(optional=optional).items()
        if (installed := installed_version(name)) is not None
        and not requirement.specifier.contains(installed, prereleases=True)
    ]


def _requirements(*, optional: bool) -> Mapping[str, Requirement]:
    """Return duoka's requirements by name: those of extras if `optional`, else the others."""
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

"""Requirements: installed versions of libraries, compared with the supported ranges."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from duoka.errors import UsageError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


EXTRAS = {
    "torchao": ("quantize", "8-bit and 4-bit weights: --quantize int8 or int4"),
    "bitsandbytes": ("bnb", "--quantize nf4, --train qlora, --optimizer adamw8bit"),
    "gguf": ("gguf", "GGUF files beside a plan: --export llama.cpp --gguf"),
    "modelscope_hub": ("modelscope", "models on ModelScope: modelscope:org/name"),
    "pyarrow": ("parquet", "training data in Parquet"),
    "ray": ("ray", "replicas on a Ray cluster: duoka serve --on ray"),
}
"""Optional packages, each with its extra and its purpose."""


def require_package(package: str, who_needs: str) -> None:
    """Raise UsageError, such as "plots need matplotlib, …", if an optional package is missing."""
    if find_spec(package) is None:
        hint = f'pip install "duoka[{EXTRAS[package][0]}]"'
        raise UsageError(f"{who_needs} {package}, which isn't installed", hint=hint)


def missing_extras() -> list[tuple[str, str]]:
    """Return the extra and the purpose of each optional package that isn't installed."""
    return [extra for package, extra in EXTRAS.items() if find_spec(package) is None]


def installed_version(name: str) -> str | None:
    """Return the version of a package; None if the package isn't installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def unmet_requirements(*, optional: bool = False) -> list[str]:
    """Describe installed libraries in unsupported versions, and required ones that are missing.

    With `optional` the libraries are those of extras, which may be missing.
    """
    texts = []
    for name, requirement in _requirements(optional=optional).items():
        installed = installed_version(name)
        if installed is None and not optional:
            texts.append(f"{name} is not installed")
        elif installed and not requirement.specifier.contains(installed, prereleases=True):
            texts.append(f"{name} {installed} is installed, duoka needs {requirement.specifier}")
    return texts


def _requirements(*, optional: bool) -> Mapping[str, Requirement]:
    """Return duoka's requirements by name: those of extras if `optional`, else the others."""
    from packaging.requirements import Requirement

    try:
        needed = map(Requirement, requires("duoka") or [])
    except PackageNotFoundError:
        return {}
    return {it.name: it for it in needed if (it.marker is not None) == optional}

"""Table of the licenses of duoka's dependencies: docs/licenses.md.

    python scripts/licenses.py SITE_PACKAGES           compares the page with an environment
    python scripts/licenses.py SITE_PACKAGES --write   writes the page

The environment holds `duoka[all]`. Names and licenses are compared, versions are not. Only
licenses of `ALLOWED` pass; a license that a package does not state is an error until somebody has
read it and added it to `OVERRIDES`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PAGE = Path(__file__).resolve().parents[1] / "docs" / "licenses.md"
HEAD = """\
# Licenses of the dependencies

`pip install 'duoka[all]'` installs these packages on Linux with CPython 3.11. (`ray`, which is not
in `all`, is missing here.) `make release-check` compares names and licenses with a fresh
environment; versions are those of the last update. The license is the SPDX expression that a
package states. An older package states a name or a classifier, which `scripts/licenses.py`
translates. Libraries that a wheel contains beside the package's own code, such as those of torch,
are covered by its expression only if the package lists them there. duoka itself is Apache-2.0;
four libraries of the chat page are MIT, BSD-3-Clause or Apache-2.0.
"""
CUDA_HEAD = """
## CUDA

torch's default build for Linux also installs the following; its CPU build installs none of them.
NVIDIA's libraries are proprietary: read the `License.txt` in each package before you redistribute
them, as in an image.
"""
UNKNOWN = "unknown"
# Permissive licenses, and the file-level copyleft of MPL-2.0.
ALLOWED = frozenset(
    "0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python HPND ISC MIT MIT-0 "
    "MIT-CMU MPL-2.0 PSF-2.0 Python-2.0 Unlicense Zlib "
    "Apache-2.0 WITH LLVM-exception".replace(" WITH ", "_WITH_").split()
)
# Packages that torch's CUDA build brings; their proprietary license passes for these names only.
CUDA = re.compile(r"nvidia-(?!ml-py)|cuda-|triton$")
CUDA_LICENSE = "LicenseRef-NVIDIA-Proprietary"
CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "The Unlicense (Unlicense)": "Unlicense",
}
# Texts of the field License that name one license without doubt.
FIELDS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache Software License 2.0": "Apache-2.0",
    "Apache-2": "Apache-2.0",
    "BSD 3-Clause License": "BSD-3-Clause",
    "BSD-3": "BSD-3-Clause",
    "MIT License": "MIT",
    "NVIDIA Proprietary Software": CUDA_LICENSE,
}
# Packages whose metadata leave the license open ("BSD License" names no clauses), with the reason.
_THREE_CLAUSES = "the license text in the package has the three clauses"
OVERRIDES = {
    "cuda-toolkit": (
        CUDA_LICENSE,
        "states nothing; it only requires NVIDIA's libraries",
    ),
    "jinja2": ("BSD-3-Clause", _THREE_CLAUSES),
    "mpmath": ("BSD-3-Clause", _THREE_CLAUSES),
    "nvidia-ml-py": ("BSD-3-Clause", "pynvml.py begins with the three clauses"),
    "sympy": ("BSD-3-Clause", _THREE_CLAUSES),
    "torchao": ("BSD-3-Clause", _THREE_CLAUSES),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One row of the table; `extras` are those that install the package, if duoka does not."""

    name: str
    version: str
    license: str
    extras: tuple[str, ...] = ()

    @property
    def is_cuda(self) -> bool:
        """True for a package that only torch's CUDA build installs."""
        return bool(CUDA.match(self.name))

    @property
    def identity(self) -> tuple[str, str, tuple[str, ...]]:
        """What the page is compared by."""
        return self.name, self.license, self.extras


def spdx(name: str, expression: str, field: str, classifiers: Iterable[str]) -> str:
    """Return the SPDX expression of a package's metadata, or `UNKNOWN`.

    Parameters
    ----------
    name : str
        The canonical name of the package.
    expression, field : str
        The fields License-Expression and License.
    classifiers : iterable of str
        The last parts of the classifiers that begin with "License".
    """
    if name in OVERRIDES:
        return OVERRIDES[name][0]
    for text in (expression, FIELDS.get(field.strip(), field.strip())):
        try:
            return str(canonicalize_license_expression(text))
        except InvalidLicenseExpression:
            continue
    found = [CLASSIFIERS.get(each, UNKNOWN) for each in classifiers]
    return UNKNOWN if UNKNOWN in found or not found else " AND ".join(sorted(set(found)))


def is_allowed(expression: str, allowed: frozenset[str] = ALLOWED) -> bool:
    """Return True if an SPDX expression permits use under allowed licenses only."""
    text = expression.replace(" WITH ", "_WITH_")
    # Innermost parentheses become the word True or False.
    while group := re.search(r"\(([^()]*)\)", text):
        text = f"{text[: group.start()]}{_holds(group[1], allowed)}{text[group.end() :]}"
    return _holds(text, allowed)


def _holds(text: str, allowed: frozenset[str]) -> bool:
    """Evaluate an expression without parentheses; AND binds more tightly than OR."""
    return any(
        all(word.strip() in allowed | {"True"} for word in choice.split(" AND "))
        for choice in text.split(" OR ")
    )


def license_faults(packages: Iterable[Package]) -> list[str]:
    """Describe each package whose license is unknown or not allowed."""
    return [
        f"{package.name} {package.version}: license {package.license} is not allowed"
        for package in packages
        if not is_allowed(package.license, ALLOWED | {CUDA_LICENSE} if package.is_cuda else ALLOWED)
    ]


def page_faults(shown: Iterable[Package], installed: Iterable[Package]) -> list[str]:
    """Describe the differences of the page and an environment, which may lack CUDA's packages."""
    installed = list(installed)
    names = {package.name for package in installed}
    before = {each.identity for each in shown if each.name in names or not each.is_cuda}
    after = {package.identity for package in installed}
    return [
        *(f"{name} ({text}) is not on the page" for name, text, _ in sorted(after - before)),
        *(f"{name} ({text}) is on the page only" for name, text, _ in sorted(before - after)),
    ]


def format_page(packages: Iterable[Package]) -> str:
    """Build docs/licenses.md."""
    packages = sorted(packages, key=lambda package: package.name)
    text = HEAD + "\n| package | version | license | installed with |\n|---|---|---|---|\n"
    for package in packages:
        if not package.is_cuda:
            extras = ", ".join(f"`duoka[{extra}]`" for extra in package.extras) or "`duoka`"
            text += f"| {package.name} | {package.version} | {package.license} | {extras} |\n"
    text += CUDA_HEAD + "\n| package | version | license |\n|---|---|---|\n"
    for package in packages:
        if package.is_cuda:
            text += f"| {package.name} | {package.version} | {package.license} |\n"
    return text


def requirement_name(line: str) -> str:
    """Return the canonical name of the package that a requirement names."""
    return canonicalize_name(Requirement(line).name)


def write_page(packages: Iterable[Package]) -> None:
    """Write docs/licenses.md; keep CUDA's packages if the environment has none."""
    packages = list(packages)
    names = {package.name for package in packages}
    shown = parse_page(PAGE.read_text(encoding="utf-8"))
    kept = [each for each in shown if each.is_cuda and each.name not in names]
    PAGE.write_text(format_page([*packages, *kept]), encoding="utf-8")


def parse_page(text: str) -> list[Package]:
    """Read the tables of docs/licenses.md."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [
        Package(
            name=row[0],
            version=row[1],
            license=row[2],
            extras=tuple(re.findall(r"duoka\[(\w+)\]", row[3])) if len(row) == 4 else (),
        )
        for row in rows
        if row[0] != "package"
    ]


def installed_packages(directory: Path) -> list[Package]:
    """Return duoka's dependencies in a site-packages directory, those of its extras included."""
    found = {canonicalize_name(each.name): each for each in distributions(path=[str(directory)])}
    required = _reachable(found, "duoka", frozenset())
    packages = {name: _package(name, found[name], ()) for name in required}
    extras = found["duoka"].metadata.get_all("Provides-Extra") or []
    for name in sorted(_reachable(found, "duoka", frozenset({"all"})) - required):
        needed_by = [
            extra
            for extra in sorted(set(extras) - {"all", "dev"})
            if name in _reachable(found, "duoka", frozenset({extra}))
        ]
        packages[name] = _package(name, found[name], tuple(needed_by))
    del packages["duoka"]
    return list(packages.values())


def _package(name: str, distribution: Distribution, extras: tuple[str, ...]) -> Package:
    metadata = distribution.metadata
    classifiers = metadata.get_all("Classifier") or []
    license_names = [each.split(" :: ")[-1] for each in classifiers if each.startswith("License")]
    expression, field = metadata.get("License-Expression", ""), metadata.get("License", "")
    text = spdx(name, str(expression), str(field), license_names)
    version = distribution.version.partition("+")[0]  # without the build, such as torch's +cpu
    return Package(name=name, version=version, license=text, extras=extras)


def _reachable(found: Mapping[str, Distribution], name: str, extras: frozenset[str]) -> set[str]:
    """Return the installed packages that a package requires, itself included."""
    done: set[tuple[str, frozenset[str]]] = set()
    queue = [(name, extras)]
    while queue:
        entry = queue.pop()
        if entry in done or entry[0] not in found:
            continue
        done.add(entry)
        for line in found[entry[0]].requires or []:
            requirement = Requirement(line)
            contexts = [{"extra": extra} for extra in entry[1] | {""}]
            marker = requirement.marker
            if marker is None or any(marker.evaluate(context) for context in contexts):
                wanted = frozenset(requirement.extras)
                queue.append((canonicalize_name(requirement.name), wanted))
    return {name for name, _ in done}


def main() -> int:
    """Compare or write the page; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path, help="a site-packages directory with duoka[all]")
    parser.add_argument("--write", action="store_true", help="write the page")
    arguments = parser.parse_args()
    packages = installed_packages(arguments.directory)
    if arguments.write:
        write_page(packages)
    shown = parse_page(PAGE.read_text(encoding="utf-8"))
    faults = license_faults(packages) + page_faults(shown, packages)
    print("\n".join(faults) or f"{len(packages)} packages: all licenses are allowed")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
